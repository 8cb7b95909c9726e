"""Task sets: deterministic, held out by construction, right by independent computation; traces wrong as declared."""

import random
from collections import Counter

import pytest

from data.config import TaskSetConfig
from data.corpus import make_tasks, task_key
from data.dotted import resolve
from data.harness import grade
from data.tasks import coding, general, research
from data.types import Task, Transcript

MODULES = {"coding": coding, "general": general, "research": research}


def config(domain: str, num_test: int = 60) -> TaskSetConfig:
    return TaskSetConfig(
        domain=domain, generator=f"data.tasks.{domain}:make_task", seed=3, num_train=300, num_test=num_test
    )


@pytest.mark.parametrize("domain", MODULES)
def test_splits_are_disjoint_unique_and_deterministic(domain: str) -> None:
    splits = make_tasks(config(domain))
    keys = [task_key(task) for task in splits["test"]]
    assert len(set(keys)) == 60
    assert not set(keys) & {task_key(task) for task in splits["train"]}
    assert make_tasks(config(domain)) == splits


@pytest.mark.parametrize("domain", MODULES)
def test_corpus_never_shows_a_test_task(domain: str, documents: list) -> None:
    test = {task_key(task) for task in make_tasks(config(domain))["test"]}
    shown = {task_key(d.task) for d in documents if d.task.domain == domain}
    assert shown
    assert not shown & test


def test_too_many_test_tasks_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"different test tasks of 384; lower domains\.general\.num_test"):
        make_tasks(
            TaskSetConfig(
                domain="general", generator="data.tasks.general:make_task", seed=0, num_train=1, num_test=384
            ),
            attempts_per_task=1,
        )


def test_a_task_of_another_domain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"says domain 'general', split 'train', not 'math', 'train'.* domains\.math"):
        make_tasks(
            TaskSetConfig(domain="math", generator="data.tasks.general:make_task", seed=0, num_train=1, num_test=1)
        )


@pytest.mark.parametrize("domain", MODULES)
def test_an_effort_without_a_style_is_refused(domain: str) -> None:
    module = MODULES[domain]
    with pytest.raises(ValueError, match="low, high and max, not for effort 'ultra'"):
        module.write_trace(module.make_task(0, 0, "train"), "ultra", random.Random(0), 0.0)


def test_general_reference_agrees_with_python() -> None:
    for index in range(200):
        task = general.make_task(0, index, "train")
        expression = task.messages[-1].text
        value = int(expression[0])
        for operator, operand in zip(expression[1::2], expression[2::2], strict=True):
            value = eval(f"(({value}){operator}{operand}) % 10")
        assert task.reference["answer"] == str(value)


def test_coding_reference_agrees_with_lists() -> None:
    def run(values: list[int], steps: list[str]) -> list[int]:
        for step in steps:
            if step == "rot":
                values = values[1:] + values[:1]
            elif step == "back":
                values = values[-1:] + values[:-1]
            elif step == "flip":
                values = list(reversed(values))
            elif step == "swap":
                values[0], values[1] = values[1], values[0]
            elif step == "tail":
                values[1], values[2] = values[2], values[1]
            elif step == "copy":
                values[1] = values[0]
            else:
                raise AssertionError(step)
        return values

    for index in range(200):
        task = coding.make_task(0, index, "train")
        start, *steps = task.messages[-1].text.removeprefix("f=").split(".")
        for inputs, expected in task.reference["tests"]:
            named = dict(zip("abc", inputs, strict=True))
            assert run([named[name] for name in start], steps) == expected


def test_research_answer_is_reached_by_searching() -> None:
    for index in range(200):
        task = research.make_task(0, index, "train")
        person, *relations = task.messages[-1].text.split(".")
        calls: list[str] = []
        for relation in relations:
            query = f"{person}.{relation}"
            found = research.search(task, query, calls)
            if found == research.NOTHING:
                assert query in task.reference["fails"]
                found = research.search(task, query, [*calls, query])
            calls.append(query)
            person = found.split("@")[0]
        assert found == f"{task.reference['answer']}@{task.reference['document']}"


@pytest.mark.parametrize(("domain", "effort"), [(d, e) for d in MODULES for e in ("low", "high", "max")])
def test_traces_are_mostly_wrong_in_the_declared_ways_and_right_without_faults(
    domain: str, effort: str, monkeypatch
) -> None:
    module = MODULES[domain]
    tasks = [module.make_task(1, index, "train") for index in range(300)]

    def accuracy() -> float:
        traces = [module.write_trace(t, effort, random.Random(i), 0.0) for i, t in enumerate(tasks)]
        verdicts = grade([(t, Transcript(tuple(c), "stop")) for t, c in zip(tasks, traces, strict=True)])
        return Counter(v.outcome for v in verdicts)["pass"] / len(tasks)

    flawed = accuracy()
    for name in (
        "RIGHT_PRODUCT",
        "RIGHT_BORROW",
        "RIGHT_BACK",
        "RIGHT_COPY",
        "CITES",
        "NEXT_PERSON",
        "RETRIES",
        "GOES_ON",
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, 1.0)
    assert flawed < 0.75 * accuracy()
    if effort == "max":
        assert accuracy() == 1.0


def test_grader_path_that_does_not_resolve_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="has no function 'grad'; it has"):
        resolve("data.graders.exact:grad")
    with pytest.raises(ValueError, match="does not resolve"):
        resolve("data.graders.nowhere:grade")


def research_verdict(task: Task, *channels: tuple[str, str]) -> str:
    return grade([(task, Transcript(channels, "stop"))])[0].outcome


def test_a_citation_must_have_been_retrieved_in_this_episode() -> None:
    task = next(
        t
        for i in range(50)
        if len((t := research.make_task(2, i, "train")).reference["documents"]) and "." in t.messages[-1].text
    )
    answer = f"{task.reference['answer']}@{task.reference['document']}"
    other = "z" if task.reference["document"] != "z" else "y"
    assert research_verdict(task, ("call", "q"), ("result", answer), ("answer", answer)) == "pass"
    assert research_verdict(task, ("answer", answer)) == "fail"
    assert research_verdict(task, ("result", answer), ("answer", task.reference["answer"])) == "fail"
    assert research_verdict(task, ("result", answer), ("answer", f"{task.reference['answer']}@{other}")) == "fail"
    assert research_verdict(task, ("think", answer), ("answer", answer)) == "fail"
