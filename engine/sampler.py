"""The sampler's interface: token ids in, completions out. Every backend (in-process, a server) fits behind it.

Legend: T tokens of one prompt. Nothing here needs a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from data.types import FinishReason
from engine.model import Qwen3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """``temperature`` 0 is greedy. ``max_new_tokens`` counts sampled tokens. Raises ValueError where out of range."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature} must be 0 (greedy) or a positive number")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt and how many completions of it; ``max_new_tokens`` None means the call's."""

    token_ids_T: tuple[int, ...]
    num_samples: int
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids_T:
            raise ValueError("a prompt has no tokens; it needs at least one")
        if self.num_samples < 1:
            raise ValueError(f"num_samples = {self.num_samples} must be at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True, slots=True)
class Completion:
    """What followed the prompt. Inserted tokens have ``loss_mask`` False and log-probability 0.0.

    ``logprobs`` are of the distribution that really sampled: log-softmax of the logits over the temperature; under
    greedy, where nothing was sampled, over 1. ``num_turns`` is one more than the number of insertions.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    num_turns: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A row that has just sampled a stop token; ``token_ids`` is all its completion so far, insertions included."""

    request: int
    sample: int
    token_ids: tuple[int, ...]


Respond = Callable[[Sequence[Stopped]], Sequence[Sequence[int] | None]]
"""Called with all rows that stopped at one step: the tokens to insert before each goes on, or None where it is over."""


class Sampler(Protocol):
    """A backend. Its samples come from the weights of the last ``load``, whose version it names."""

    policy_version: int

    def load(self, model: Qwen3, policy_version: int) -> None:
        """Take over the model's present weights; later changes to ``model`` do not show until the next load."""

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, respond: Respond | None = None
    ) -> list[list[Completion]]:
        """``num_samples`` completions of each request, in order: a function of weights, arguments and ``respond``.

        A row ends with "stop" when it samples a stop token and ``respond`` (absent: always) says None; with "length"
        when it has sampled its budget, or the context is full, without such a stop. Raises ValueError for a prompt that
        leaves no room in the context.
        """
        ...
