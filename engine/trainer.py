"""The trainer: samples and a loss in, one optimizer step out.

Legend: N trained tokens of a micro-batch, U states that predict them, D hidden size, V vocabulary.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.types import Sample, Update
from engine.batches import Batch, pack
from engine.config import OptimizerConfig
from engine.losses import Loss
from engine.model import Qwen3
from engine.optim import Optimizer, clip_gradients


class Trainer(Protocol):
    """What the loops know of a training back end."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def policy_version(self) -> int:
        """Changes with every change of the weights."""
        ...

    @property
    def model(self) -> Qwen3:
        """The live weights, to be read only."""
        ...

    def update(self, samples: Sequence[Sample], loss: Loss) -> Update:
        """One optimizer step on the mean of ``loss`` over the trained tokens of ``samples``."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer state and step count into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Continues from what ``save`` wrote, bit for bit."""
        ...


class EmbeddedTrainer:
    """Trains in this process, in fp32. ``num_steps`` is the length of the learning-rate schedule.

    ``torch.get_num_threads()`` micro-batches are worked on side by side, each by one thread: on tiny tensors a second
    thread inside an operation gains little. Gradients are added in the micro-batches' order, so that the number of
    threads does not change a bit of the result.
    """

    def __init__(
        self, model: Qwen3, optimizer: OptimizerConfig, num_steps: int, tokens_per_micro_batch: int = 1024
    ) -> None:
        self._model = model
        self._optimizer = Optimizer(model, optimizer, num_steps)
        self._max_grad_norm = optimizer.max_grad_norm
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._parameters = list(model.parameters())
        self._threads = ThreadPoolExecutor(torch.get_num_threads())
        self._step = 0

    @property
    def step(self) -> int:
        return self._step

    @property
    def policy_version(self) -> int:
        return self._step

    @property
    def model(self) -> Qwen3:
        return self._model

    def update(self, samples: Sequence[Sample], loss: Loss) -> Update:
        """One step on the mean of ``loss`` over all trained tokens; its gradient does not depend on the micro-batches.

        Raises ValueError when nothing is trained or a sample is malformed, FloatingPointError (before the optimizer
        step, weights untouched) when the loss, a metric or the gradient is not finite.
        """
        batches = pack(samples, self._tokens_per_micro_batch)
        if not batches:
            raise ValueError(f"step {self._step + 1}: none of the {len(samples)} samples has a trained token")
        with _one_thread_per_operation():
            gradients, values = self._accumulate(batches, loss)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        grad_norm = clip_gradients(self._parameters, self._max_grad_norm)
        self._require_finite(values | {"grad_norm": float(grad_norm)})
        self._optimizer.step(self._step)
        self._model.zero_grad(set_to_none=True)
        self._step += 1
        num_tokens = batches[0].num_loss_tokens
        return Update(self._step, self.policy_version, values.pop("loss"), float(grad_norm), num_tokens, values)

    def _accumulate(self, batches: Sequence[Batch], loss: Loss) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient of each parameter, and loss and metrics as means over the global token count."""

        def differentiate(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            total, metrics = loss(state_logits(self._model, batch), batch)
            gradients = torch.autograd.grad(total / batch.num_loss_tokens, self._parameters)
            return gradients, {name: value / batch.num_loss_tokens for name, value in metrics.items()} | {
                "loss": total.detach() / batch.num_loss_tokens
            }

        sums: list[Tensor] = []
        values: dict[str, float] = defaultdict(float)
        for gradients, metrics in self._threads.map(differentiate, batches):
            if sums:
                torch._foreach_add_(sums, gradients)
            else:
                sums = list(gradients)
            for name, value in metrics.items():
                values[name] += float(value)
        return sums, dict(values)

    def _require_finite(self, values: dict[str, float]) -> None:
        odd = {name: value for name, value in values.items() if not abs(value) < float("inf")}
        if odd:
            self._model.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self._step + 1} stopped before the update, not finite: {odd}")

    def save(self, folder: Path) -> None:
        save_file(_contiguous(self._model.state_dict()), folder / "model.safetensors")
        save_file(_contiguous(self._optimizer.state()), folder / "optimizer.safetensors")
        (folder / "trainer.json").write_text(json.dumps({"step": self._step}) + "\n")

    def load(self, folder: Path) -> None:
        self._model.load_state_dict(load_file(folder / "model.safetensors"))
        self._optimizer.load_state(load_file(folder / "optimizer.safetensors"))
        self._step = int(json.loads((folder / "trainer.json").read_text())["step"])


def state_logits(model: Qwen3, batch: Batch) -> Tensor:
    """Logits (U, V) of the states that predict trained tokens; other positions never meet the head."""
    hidden_UD = model(batch.token_ids_BT, batch.position_ids_BT, batch.visible_BTT, batch.source_U)
    return model.logits(hidden_UD)


def trained_logits(model: Qwen3, batch: Batch) -> Tensor:
    """Logits (N, V) that predict each of the batch's trained tokens."""
    return state_logits(model, batch).index_select(0, batch.state_N)


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
