"""The answer equals the reference, letter for letter."""

from collections.abc import Sequence

from data.types import Task, Transcript, Verdict


def grade(pairs: Sequence[tuple[Task, Transcript]]) -> list[Verdict]:
    """One verdict a pair; the reference is ``{"answer": text}``, never empty."""
    return [_grade(task, transcript) for task, transcript in pairs]


def _grade(task: Task, transcript: Transcript) -> Verdict:
    if transcript.answer is None:
        return Verdict("fail", 0.0, reason="no answer")
    expected = task.reference["answer"]
    if transcript.answer == expected:
        return Verdict("pass", 1.0)
    return Verdict("fail", 0.0, reason=f"expected {expected}")
