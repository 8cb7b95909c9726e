"""Mid-training: a model from random weights learns the corpus by next-token cross-entropy on the assistant's tokens."""

import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.arrow import load_rows
from data.stage import StageRequest
from data.tokenizer import load_markup
from data.types import Sample
from engine.checkpoint import load_latest, save_checkpoint
from engine.config import MidtrainConfig
from engine.losses import cross_entropy
from engine.metrics import MetricsLog, seed_for
from engine.trainer import EmbeddedTrainer
from engine.weights import new_model, save_model


def midtrain(request: StageRequest) -> dict[str, float]:
    """Trains from random weights on the ``corpus`` input and writes the base model's folder. Resumes bit for bit."""
    config = MidtrainConfig.model_validate(request.config)
    corpus = request.input("corpus")
    model = new_model(config.model, load_markup(corpus).vocab_size, seed_for(config.seed, "weights"))
    trainer = EmbeddedTrainer(model, config.optimizer, config.num_steps, config.tokens_per_micro_batch)
    log = MetricsLog(request.metrics_path)
    load_latest(request.checkpoint_path, trainer)
    log.truncate_after(trainer.step)
    documents = load_documents(corpus / "documents")
    batches = batches_of(len(documents), config.batch_size, config.seed, start=trainer.step)
    while trainer.step < config.num_steps:
        started = time.monotonic()
        update = trainer.update([documents[i] for i in next(batches)], cross_entropy)
        seconds = time.monotonic() - started
        log.write(
            update.step,
            loss=update.loss,
            grad_norm=update.grad_norm,
            num_tokens=update.num_tokens,
            tokens_per_s=update.num_tokens / seconds,
            **update.metrics,
        )
        if update.step % config.checkpoint_every == 0:
            save_checkpoint(request.checkpoint_path, update.step, trainer, {})
    save_model(trainer.model, request.output_path, tokenizer_from=corpus)
    return log.mean_of_last(20, "loss", "token_accuracy")


def batches_of(num_rows: int, batch_size: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """Row indices of batch ``start``, ``start + 1``, …: every epoch a new permutation, nothing dropped."""
    position = start * batch_size
    order: list[int] = []
    epoch = -1
    while True:
        batch: list[int] = []
        while len(batch) < batch_size:
            if position // num_rows != epoch:
                epoch = position // num_rows
                order = list(range(num_rows))
                random.Random(seed_for(seed, "epoch", epoch)).shuffle(order)
            taken = order[position % num_rows :][: batch_size - len(batch)]
            batch += taken
            position += len(taken)
        yield batch


def load_documents(folder: Path) -> list[Sample]:
    """The corpus's rows as samples for the supervised loss."""
    return [_to_sample(row) for row in load_rows(folder)]


def _to_sample(row: Mapping[str, Any]) -> Sample:
    zeros = (0.0,) * len(row["token_ids"])
    return Sample(tuple(row["token_ids"]), tuple(row["loss_mask"]), zeros, zeros, row["domain"], row["effort"])
