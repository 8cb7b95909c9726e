"""The answer is one Python expression; it is right when it gives the right value for every hidden input.

The expression runs in the sandbox, which sees it and the inputs; the right values never leave this process. Values
match when they have the same type and are equal, all the way down: 1 is not True, and a tuple is not a list.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from data.sandbox.process import TIER, Job, JobResult, Sandbox, Value
from data.types import Task, Transcript, Verdict

MAX_CHARS = 200
MAX_TASKS_A_JOB = 100
_MEMO_SIZE = 100_000
_memo: dict[tuple[str, str], Verdict] = {}


def grade(pairs: Sequence[tuple[Task, Transcript]]) -> list[Verdict]:
    """One verdict a pair; the reference is ``{"variables": [name, …], "tests": [[[input, …], expected], …]}``.

    A list in ``expected`` stands for a tuple (JSON has none). Equal answers to equal tests are judged once a process.
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
    """Verdicts of (answer, tests). An answer to several tasks runs once, on the inputs of all of them.

    Should that fail, each is run by itself: what one task's inputs do to an answer must not decide another's verdict.
    """
    cases = {key: _Case.parse(*key) for key in keys}
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = defaultdict(list)
    for key, case in cases.items():
        groups[key[0], case.variables].append(key)
    batches = [batch for group in groups.values() for batch in _cut(group, MAX_TASKS_A_JOB)]
    results: dict[tuple[str, str], JobResult] = {}
    for batch, result in zip(batches, _run_each([[cases[key] for key in batch] for batch in batches]), strict=True):
        if len(batch) == 1 or result.status == "infra":
            results.update(dict.fromkeys(batch, result))
        elif result.status == "ok" and len(result.values) == sum(len(cases[key].expected) for key in batch):
            values = iter(result.values)
            for key in batch:
                results[key] = JobResult("ok", tuple(islice(values, len(cases[key].expected))), tier=result.tier)
    if alone := [key for key in keys if key not in results]:
        results.update(zip(alone, _run_each([[cases[key]] for key in alone]), strict=True))
    return {key: _judge(results[key], case.expected) for key, case in cases.items()}


class _Case(NamedTuple):
    """An answer and one task's tests."""

    answer: str
    variables: tuple[str, ...]
    inputs: tuple[tuple[Any, ...], ...]
    expected: tuple[Value, ...]

    @classmethod
    def parse(cls, answer: str, tests: str) -> "_Case":
        variables, rows = json.loads(tests)
        inputs = tuple(tuple(values) for values, _ in rows)
        return cls(answer, tuple(variables), inputs, tuple(_as_tuple(value) for _, value in rows))


def _run_each(batches: Sequence[Sequence[_Case]]) -> list[JobResult]:
    jobs = [Job(b[0].answer, b[0].variables, tuple(row for case in b for row in case.inputs)) for b in batches]
    return _sandbox().run(jobs)


def _cut(keys: Sequence[tuple[str, str]], size: int) -> list[Sequence[tuple[str, str]]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


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
