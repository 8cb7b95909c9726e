"""The code grader: executed on hidden inputs, exact types, and no reward for anything but the right function."""

import random
from typing import Any

import pytest

from data.graders import code
from data.graders.code import grade
from data.sandbox.process import Sandbox
from data.tasks.coding import make_task
from data.types import FinishReason, Message, Task, Transcript, Verdict

TESTS = [[[1, 2, 3], [3, 2, 1]], [[4, 5, 6], [6, 5, 4]], [[7, 8, 9], [9, 8, 7]]]


def task(tests: list[Any] | None = None) -> Task:
    return Task(
        id="coding-test-0",
        domain="coding",
        messages=(Message("user", "f=cba"),),
        tools=(),
        grader="data.graders.code:grade",
        reference={"variables": ["a", "b", "c"], "tests": TESTS if tests is None else tests},
        source="hand",
        split="test",
    )


def answer(text: str, finish_reason: FinishReason = "stop") -> Transcript:
    return Transcript((("think", "=cba"), ("answer", text)), finish_reason)


@pytest.mark.parametrize("text", ["c,b,a", "(c, b, a)", "tuple(reversed((a, b, c)))", "(a, b, c)[::-1]", "+c,0+b,a*1"])
def test_any_expression_of_the_function_passes(text: str) -> None:
    assert grade([(task(), answer(text))]) == [Verdict("pass", 1.0, {"tests": 1.0}, "process")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b,c", "wrong on 3 of 3 inputs"),
        ("3,2,1", "wrong on 2 of 3 inputs"),  # the first case by heart
        ("[c,b,a]", "wrong on 3 of 3 inputs"),
        ("c,b", "wrong on 3 of 3 inputs"),
        ("float(c),b,a", "wrong on 3 of 3 inputs"),
        ("c,b,a,d", "error NameError"),
        ("c,b,a)", "error SyntaxError"),
        ("", "an answer of 0 characters; 1 to 200 are run"),
        ("  ", "an answer of 2 characters; 1 to 200 are run"),
        ("c,b,a" + " " * 200, "an answer of 205 characters; 1 to 200 are run"),
    ],
)
def test_wrong_answers_fail_with_a_reason(text: str, reason: str) -> None:
    (verdict,) = grade([(task(), answer(text))])
    assert (verdict.outcome, verdict.reward, verdict.reason, verdict.tier) == ("fail", 0.0, reason, "process")


def test_true_is_not_one() -> None:
    ones = task([[[1, 2, 3], 1]])
    assert [v.outcome for v in grade([(ones, answer("a == 1")), (ones, answer("a"))])] == ["fail", "pass"]
    nested = task([[[1, 2, 3], [1, [0, "x"]]]])
    outcomes = [v.outcome for v in grade([(nested, answer(t)) for t in ("1,(a==2,'x')", "1,(0,'x')", "1,[0,'x']")])]
    assert outcomes == ["fail", "pass", "fail"]


def test_only_an_answer_that_ended_the_episode_counts() -> None:
    cut_off = answer("c,b,a", "length")
    twice = Transcript((("answer", "a,b,c"), ("answer", "c,b,a")), "stop")
    thought = Transcript((("think", "c,b,a"),), "stop")
    verdicts = grade([(task(), t) for t in (cut_off, twice, thought)])
    assert [(v.outcome, v.reason) for v in verdicts] == [("fail", "no answer")] * 3


def test_verdicts_keep_the_order_of_a_mixed_batch() -> None:
    other = task([[[1, 2, 3], [1, 2, 3]]])
    pairs = [(task(), answer("c,b,a")), (other, answer("c,b,a")), (other, answer("a,b,c")), (task(), answer(""))]
    assert [v.outcome for v in grade(pairs * 3)] == ["pass", "fail", "pass", "fail"] * 3


def test_equal_answers_to_equal_tests_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    with Sandbox() as sandbox:

        class Counting:
            def run(self, jobs: Any) -> Any:
                calls.append(len(jobs))
                return sandbox.run(jobs)

        monkeypatch.setattr(code, "_sandbox", Counting)
        text = f"c,b,a,{random.random()}"
        grade([(task(), answer(text))] * 50)
        grade([(task(), answer(text))] * 50)
        assert calls == [1]
        others = [
            (task([[[i, 0, 0], i]]), answer(f"a+0*{random.random()}") if i == 9 else answer(text)) for i in range(10)
        ]
        grade(others)
    assert calls == [1, 2]  # two answers, however many tasks; neither failed


def test_a_task_s_inputs_do_not_decide_another_s_verdict() -> None:
    divides, passes = task([[[1, 2, 3], 0]]), task([[[2, 4, 1], 2], [[3, 6, 1], 1]])
    text = answer("a//(a-1)" + " " * random.randrange(100))
    for batch in ([divides, passes], [passes, divides]):
        outcomes = {id(t): v.outcome for t, v in zip(batch, grade([(t, text) for t in batch]), strict=True)}
        assert outcomes == {id(divides): "fail", id(passes): "pass"}
        code._memo.clear()


def test_a_large_batch_gives_each_task_its_own_verdict() -> None:
    tasks = [task([[[i, i + 1, 0], [0, i]], [[7, i, 3], [3, 7]]]) for i in range(250)]
    wanted = ["pass" if i % 3 else "fail" for i in range(250)]
    verdicts = grade([(t, answer("c,a" if w == "pass" else "c,b")) for t, w in zip(tasks, wanted, strict=True)])
    assert [v.outcome for v in verdicts] == wanted
    assert verdicts[1].parts == {"tests": 1.0}


def test_infra_is_neither_pass_nor_fail_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"c,b,a,{random.random()}"
    with Sandbox() as sandbox:
        monkeypatch.setattr(code, "_sandbox", lambda: sandbox)
        sandbox.close()
        sandbox._python = "/nonexistent/python"
        (verdict,) = grade([(task(), answer(text))])
        assert (verdict.outcome, verdict.reward) == ("infra", 0.0)
    monkeypatch.undo()
    assert grade([(task(), answer(text))])[0].outcome == "fail"


def test_a_task_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="coding-test-0 has no tests"):
        grade([(task([]), answer("c,b,a"))])


def test_generated_tasks_reward_their_own_gold_and_nothing_else() -> None:
    tasks = [make_task(seed=3, index=i, split="test") for i in range(40)]
    golds = []
    for one in tasks:
        inputs, expected = one.reference["tests"][0]
        golds.append(",".join("abc"[inputs.index(value)] for value in expected))
    assert [v.outcome for v in grade([(t, answer(g)) for t, g in zip(tasks, golds, strict=True)])] == ["pass"] * 40
    wrong = [",".join({"a": "b", "b": "c", "c": "a"}[name] for name in gold.split(",")) for gold in golds]
    assert [v.outcome for v in grade([(t, answer(w)) for t, w in zip(tasks, wrong, strict=True)])] == ["fail"] * 40
