"""A research answer ``value@document``: the value is right and the document was retrieved in this very episode."""

from collections.abc import Sequence

from data.types import Task, Transcript, Verdict


def grade(pairs: Sequence[tuple[Task, Transcript]]) -> list[Verdict]:
    """One verdict a pair. Both parts are needed: a right value that cites nothing, or nothing retrieved, earns 0."""
    return [_grade(task, transcript) for task, transcript in pairs]


def _grade(task: Task, transcript: Transcript) -> Verdict:
    if transcript.answer is None:
        return Verdict("fail", 0.0, reason="no answer")
    value, _, document = transcript.answer.partition("@")
    retrieved = {text for channel, text in transcript.channels if channel == "result"}
    parts = {
        "value": float(value == task.reference["answer"]),
        "citation": float(transcript.answer in retrieved and document == task.reference["document"]),
    }
    if all(parts.values()):
        return Verdict("pass", 1.0, parts)
    reason = "wrong value" if not parts["value"] else "the citation was not retrieved or does not hold the claim"
    return Verdict("fail", 0.0, parts, reason=reason)
