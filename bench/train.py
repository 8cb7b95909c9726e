"""Tokens a second of one training update against transformers' Qwen3 with padded rows, in the same run.

    OMP_NUM_THREADS=1 python -m bench.train

Three workloads of 256 sequences on a decoder of 0.2M parameters: *corpus*, mid-training documents of different tasks;
*random*, GRPO groups of 8 that share their prompt and nothing else; *traces*, GRPO groups of 8 whose completions are
written traces. Both sides do the same update (same loss, AdamW, clipping) on the same weights. The rival runs in
micro-batches of several sizes, its best counts: *padded* takes the sequences as they come, *tuned* sorted by length.
Tokens are those of the sequences, padding and sharing not counted. Seconds are the best of several rounds that take
turns, in CPU time of the process.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.reference import to_transformers
from data.config import CorpusConfig, DomainSource
from data.corpus import Document, fit_tokenizer, render_document, write_documents
from data.markup import Markup
from data.tasks import coding, general, research
from data.types import Sample
from engine.config import ModelConfig, OptimizerConfig
from engine.losses import clipped_policy_gradient
from engine.model import Qwen3
from engine.trainer import EmbeddedTrainer
from engine.weights import new_model

SHAPE = ModelConfig(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=192)
OPTIMIZER = OptimizerConfig(lr=1e-5)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
NUM_PROMPTS, GROUP_SIZE = 32, 8
ROUNDS = 6


def main() -> None:
    torch.set_num_threads(1)
    documents, markup = make_corpus()
    workloads = {
        "corpus": [to_sample(markup, d, 1.0) for d in documents[: NUM_PROMPTS * GROUP_SIZE]],
        "random": random_groups(markup.vocab_size),
        "traces": trace_groups(documents, markup),
    }
    print("workload    tokens  trained  nonet tok/s  tuned tok/s  ratio  padded tok/s  ratio  loss gap")
    for name, samples in workloads.items():
        compare(name, samples, markup.vocab_size)


def compare(name: str, samples: Sequence[Sample], vocab_size: int) -> None:
    model = new_model(SHAPE, vocab_size, seed=0)
    loss = clipped_policy_gradient(CLIP_LOW, CLIP_HIGH)
    trainers = {size: EmbeddedTrainer(new_model(SHAPE, vocab_size, 0), OPTIMIZER, 1000, size) for size in (1024, 2048)}
    sizes = (16, 32, 64, 128)
    rivals = {(side, n): Padded(model, n, side == "tuned") for side in ("tuned", "padded") for n in sizes}
    gap = abs(trainers[1024].update(samples, loss).loss - rivals["padded", 16].update(samples))
    updates: dict[tuple[str, int], Callable[[], object]] = {
        **{key: (lambda r=rival: r.update(samples)) for key, rival in rivals.items()},
        **{("nonet", n): (lambda t=trainer: t.update(samples, loss)) for n, trainer in trainers.items()},
    }
    seconds = best_of_rounds(updates)
    tokens = sum(len(s.token_ids_T) for s in samples)
    trained = sum(sum(s.loss_mask_T) for s in samples)
    ours, tuned, padded = (
        tokens / min(s for (of, _), s in seconds.items() if of == side) for side in ("nonet", "tuned", "padded")
    )
    figures = f"{ours:12.0f} {tuned:12.0f} {ours / tuned:6.1f} {padded:13.0f} {ours / padded:6.1f} {gap:9.0e}"
    print(f"{name:10} {tokens:7} {trained:8} {figures}")


def best_of_rounds(updates: dict[tuple[str, int], Callable[[], object]]) -> dict[tuple[str, int], float]:
    best = dict.fromkeys(updates, float("inf"))
    for round_ in range(ROUNDS):
        for name, update in updates.items():
            started = time.process_time()
            update()
            if round_:
                best[name] = min(best[name], time.process_time() - started)
    return best


class Padded:
    """Rows padded on the right, logits at every position, ``num_rows`` a micro-batch, by length or as they come."""

    def __init__(self, model: Qwen3, num_rows: int, by_length: bool) -> None:
        self.model = to_transformers(model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=OPTIMIZER.lr, weight_decay=0.0, fused=True)
        self.num_rows, self.by_length = num_rows, by_length

    def update(self, samples: Sequence[Sample]) -> float:
        ordered = sorted(samples, key=lambda s: len(s.token_ids_T)) if self.by_length else samples
        num_loss_tokens = sum(sum(s.loss_mask_T) for s in samples)
        self.optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(ordered), self.num_rows):
            loss = self._loss(ordered[start : start + self.num_rows]) / num_loss_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return total

    def _loss(self, rows: Sequence[Sample]) -> torch.Tensor:
        B, T = len(rows), max(len(s.token_ids_T) for s in rows)
        ids_BT, present_BT, trained_BT = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64), np.zeros((B, T), bool)
        sampler_BT, advantages_BT = np.zeros((2, B, T), np.float32)
        for b, sample in enumerate(rows):
            length = len(sample.token_ids_T)
            ids_BT[b, :length], present_BT[b, :length] = sample.token_ids_T, 1
            trained_BT[b, :length] = sample.loss_mask_T
            sampler_BT[b, :length], advantages_BT[b, :length] = sample.sampler_logprobs_T, sample.advantages_T
        ids, sampler, advantages, trained = map(torch.from_numpy, (ids_BT, sampler_BT, advantages_BT, trained_BT))
        logits_BTV = self.model(input_ids=ids, attention_mask=torch.from_numpy(present_BT), use_cache=False).logits
        logprobs_BTV = logits_BTV[:, :-1].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs_BT - sampler[:, 1:]).exp()
        held = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages[:, 1:]
        return -(torch.minimum(ratio * advantages[:, 1:], held) * trained[:, 1:]).sum()


def make_corpus() -> tuple[list[Document], Markup]:
    domains = {
        d: DomainSource(generator=f"data.tasks.{d}:make_task", traces=f"data.tasks.{d}:write_trace")
        for d in ("coding", "general", "research")
    }
    config = CorpusConfig(
        domains=domains,
        efforts=("low", "high", "max"),
        seed=0,
        num_documents=3000,
        own_style=0.8,
        step_error=0.03,
        vocab_size=512,
    )
    documents = list(write_documents(config))
    return documents, Markup(fit_tokenizer(documents, config.vocab_size))


def to_sample(markup: Markup, document: Document, advantage: float) -> Sample:
    row = render_document(markup, document)
    mask = tuple(bool(on) for on in row["loss_mask"])
    logprobs = tuple(-6.0 if on else 0.0 for on in mask)  # about what random weights give
    return Sample(
        tuple(row["token_ids"]),
        mask,
        logprobs,
        tuple(advantage if on else 0.0 for on in mask),
        row["domain"],
        row["effort"],
    )


def trace_groups(documents: Sequence[Document], markup: Markup) -> list[Sample]:
    """Groups of traces of one task at its own effort, each with its own faults and slips."""
    write = {"coding": coding.write_trace, "general": general.write_trace, "research": research.write_trace}
    samples = []
    for document in documents[:NUM_PROMPTS]:
        for i in range(GROUP_SIZE):
            rng = random.Random(f"{document.task.id}/{i}")
            trace = write[document.task.domain](document.task, document.effort, rng, 0.03)
            samples.append(to_sample(markup, replace(document, trace=trace), rng.gauss(0.0, 1.0)))
    return samples


def random_groups(vocab_size: int) -> list[Sample]:
    """Prompts of 8 to 24 tokens, completions of 4 to 32 random ones."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(NUM_PROMPTS):
        prompt = rng.integers(0, vocab_size, int(rng.integers(8, 25))).tolist()
        for _ in range(GROUP_SIZE):
            length, advantage = int(rng.integers(4, 33)), float(rng.normal())
            tokens = (*prompt, *rng.integers(0, vocab_size, length).tolist())
            mask = (False,) * len(prompt) + (True,) * length
            values = [tuple(value if on else 0.0 for on in mask) for value in (-6.0, advantage)]
            samples.append(Sample(tokens, mask, values[0], values[1], "general", "high"))
    return samples


if __name__ == "__main__":
    main()
