"""The words of the data plane: every other file speaks in these types.

Legend: T tokens of one rollout, N its trained tokens (loss_mask true), G group size, V vocabulary.
Token ids are plain tuples of int, so that nothing here needs a tensor library. ``logprobs_T[t]`` is the log-probability
*of* token t given the tokens before it; it is 0.0 where the token was not sampled by the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]
Outcome = Literal["pass", "fail", "infra"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; ``text`` never holds a special token."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with an exact grader.

    ``grader`` and ``tools`` are dotted paths (``module:function``); ``reference`` is what the grader and the tools need
    and the model never sees (JSON-serialisable).
    """

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    grader: str
    reference: Mapping[str, Any]
    source: str
    split: Split


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task rendered at one effort, up to and including the assistant's opening token."""

    task: Task
    effort: str
    token_ids_T: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.task.id}@{self.effort}"

    @property
    def cell(self) -> str:
        """``domain/effort``: the name of a column of the matrix and of the expert in charge."""
        return f"{self.task.domain}/{self.effort}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch ``[start, end)`` of a rollout's tokens sampled by one version of the policy."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompt and completion of one episode. Tokens that the environment inserted have ``loss_mask_T`` false."""

    prompt_id: str
    prompt_length: int
    token_ids_T: tuple[int, ...]
    loss_mask_T: tuple[bool, ...]
    sampler_logprobs_T: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    num_turns: int

    @property
    def num_sampled_tokens(self) -> int:
        """What an effort's token budget counts: tokens that the policy itself produced."""
        return sum(self.loss_mask_T)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader's word. ``infra`` is neither pass nor fail: it leaves the loss and the group's baseline."""

    outcome: Outcome
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tier: str = "none"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt, with their verdicts, in the same order."""

    prompt: Prompt
    rollouts_G: tuple[Rollout, ...]
    verdicts_G: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout ready for the trainer.

    ``teacher_logprobs_NV`` (fp32) is the teacher's full log-distribution at each trained token, in the order of the
    true entries of ``loss_mask_T``; None where the loss does not need it.
    """

    token_ids_T: tuple[int, ...]
    loss_mask_T: tuple[bool, ...]
    sampler_logprobs_T: tuple[float, ...]
    advantages_T: tuple[float, ...]
    domain: str
    effort: str
    teacher: str | None = None
    teacher_logprobs_NV: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did. ``num_tokens`` counts trained tokens over all ranks."""

    step: int
    policy_version: int
    loss: float
    grad_norm: float
    num_tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished episode as a grader sees it: (channel, text) in order, channels think, call, result, answer."""

    channels: tuple[tuple[str, str], ...]
    finish_reason: FinishReason

    @property
    def answer(self) -> str | None:
        """The text of the one answer that ended the episode; None when there is none, or more than one."""
        answers = [text for channel, text in self.channels if channel == "answer"]
        if self.finish_reason != "stop" or len(answers) != 1 or self.channels[-1][0] != "answer":
            return None
        return answers[0]
