"""The answer is one Python expression; it is right when it gives the right value for every hidden input.

The expression runs in the sandbox, which sees it and the inputs; the right values never leave this process. Values
match when they have the same type and are equal, all the way down: 1 is not True, and a tuple is not a list.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache

from data.sandbox.process import TIER, Job, JobResult, Sandbox, Value
from data.types import Task, Transcript, Verdict

MAX_CHARS = 200
_MEMO_SIZE = 100_000
_memo: dict[tuple[str, str], Verdict] = {}


def grade(pairs: Sequence[tuple[Task, Transcript]]) -> list[Verdict]:
    """One verdict a pair; the reference is ``{"variables": [name, …], "tests": [[[input, …], expected], …]}``.

    A list in ``expected`` stands for a tuple (JSON has none). Equal answers to equal tests are run once a process.
    Raises ValueError for a task without tests, SandboxUnavailableError when nothing can be run on this machine.
    """
    keys = [(transcript.answer, _tests_of(task)) for task, transcript in pairs]
    new = {(answer, tests) for answer, tests in keys if answer is not None and _may_run(answer)} - _memo.keys()
    graded = _run(sorted(new)) if new else {}
    verdicts = [_verdict(answer, tests, graded) for answer, tests in keys]
    if len(_memo) + len(graded) > _MEMO_SIZE:
        _memo.clear()
    _memo.update({key: verdict for key, verdict in graded.items() if verdict.outcome != "infra"})
    return verdicts


def _tests_of(task: Task) -> str:
    reference = task.reference
    if not reference.get("tests"):
        raise ValueError(f"task {task.id} has no tests: any answer would pass; drop it or give it tests")
    return json.dumps([reference["variables"], reference["tests"]])


def _may_run(answer: str) -> bool:
    return bool(answer.strip()) and len(answer) <= MAX_CHARS


def _verdict(answer: str | None, tests: str, graded: Mapping[tuple[str, str], Verdict]) -> Verdict:
    if answer is None:
        return _fail("no answer")
    if not _may_run(answer):
        return _fail(f"an answer of {len(answer)} characters; 1 to {MAX_CHARS} are run")
    return graded[answer, tests] if (answer, tests) in graded else _memo[answer, tests]


def _run(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
    jobs, expected = [], []
    for answer, tests in keys:
        variables, rows = json.loads(tests)
        jobs.append(Job(answer, tuple(variables), tuple(tuple(inputs) for inputs, _ in rows)))
        expected.append([_as_tuple(value) for _, value in rows])
    results = _sandbox().run(jobs)
    return {key: _judge(result, right) for key, result, right in zip(keys, results, expected, strict=True)}


def _judge(result: JobResult, expected: Sequence[Value]) -> Verdict:
    if result.status == "infra":
        return Verdict("infra", 0.0, tier=result.tier, reason=result.detail)
    if result.status != "ok":
        return _fail(f"{result.status} {result.detail}".strip(), {"tests": 0.0})
    if len(result.values) != len(expected):
        return _fail(f"{len(result.values)} values for {len(expected)} inputs", {"tests": 0.0})
    right = sum(_same(value, wanted) for value, wanted in zip(result.values, expected, strict=True))
    parts = {"tests": right / len(expected)}
    if right == len(expected):
        return Verdict("pass", 1.0, parts, tier=result.tier)
    return _fail(f"wrong on {len(expected) - right} of {len(expected)} inputs", parts)


def _fail(reason: str, parts: Mapping[str, float] | None = None) -> Verdict:
    return Verdict("fail", 0.0, parts or {}, tier=TIER, reason=reason)


def _same(value: Value, expected: Value) -> bool:
    if type(value) is not type(expected):
        return False
    if isinstance(value, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(value) == len(expected) and all(_same(v, e) for v, e in zip(value, expected, strict=True))
    return value == expected


def _as_tuple(value: Value) -> Value:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list) else value


@cache
def _sandbox() -> Sandbox:
    return Sandbox()
