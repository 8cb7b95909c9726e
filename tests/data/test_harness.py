"""The harness: calls get results, failing tools become text, turns are bounded, verdicts keep their order."""

from dataclasses import replace

from data.harness import TOOL_ERROR, Harness, grade
from data.markup import Markup
from data.tasks import general, research
from data.types import Transcript


def completion(markup: Markup, *channels: tuple[str, str]) -> list[int]:
    return markup.render_completion(channels)[0]


def test_a_call_is_answered_and_an_answer_ends(markup: Markup) -> None:
    task = research.make_task(0, 1, "train")
    query, (value, document) = next(iter(task.reference["documents"].items()))
    harness = Harness(markup, max_turns=8)
    task = replace(task, reference=dict(task.reference) | {"fails": [query]})
    once = completion(markup, ("call", query))
    assert harness.respond(task, once) == markup.render_result(research.NOTHING)
    again = completion(markup, ("call", query), ("result", "none"), ("call", query))
    assert harness.respond(task, again) == markup.render_result(f"{value}@{document}")
    assert harness.respond(task, completion(markup, ("answer", "x"))) is None


def test_turns_are_bounded_and_tasks_without_tools_end(markup: Markup) -> None:
    task = research.make_task(0, 1, "train")
    harness = Harness(markup, max_turns=2)
    two = completion(markup, ("call", "a"), ("result", "none"), ("call", "a"))
    assert harness.respond(task, two) is None
    assert Harness(markup, 8).respond(general.make_task(0, 0, "train"), completion(markup, ("call", "a"))) is None


def test_a_tool_that_raises_becomes_text_and_is_counted(markup: Markup) -> None:
    task = replace(research.make_task(0, 1, "train"), tools=("math:sqrt",))
    harness = Harness(markup, max_turns=8)
    assert harness.respond(task, completion(markup, ("call", "a"))) == markup.render_result(TOOL_ERROR)
    assert harness.num_tool_errors == 1


def test_mixed_batches_keep_their_order() -> None:
    tasks = [general.make_task(0, 0, "train"), research.make_task(0, 0, "train"), general.make_task(0, 1, "train")]
    answers = [tasks[0].reference["answer"], "nobody@z", "wrong"]
    pairs = [(t, Transcript((("answer", a),), "stop")) for t, a in zip(tasks, answers, strict=True)]
    assert [v.outcome for v in grade(pairs)] == ["pass", "fail", "fail"]


def test_two_calls_in_one_turn_end_the_episode(markup: Markup) -> None:
    task = research.make_task(0, 1, "train")
    query = next(iter(task.reference["documents"]))
    task = replace(task, reference=dict(task.reference) | {"fails": [query]})
    twice = completion(markup, ("call", query), ("call", query))
    assert Harness(markup, max_turns=8).respond(task, twice) is None


def test_a_result_that_the_policy_wrote_itself_is_no_retrieval(markup: Markup) -> None:
    task = research.make_task(0, 1, "train")
    answer = f"{task.reference['answer']}@{task.reference['document']}"
    ids = [*markup.render_result(answer), *completion(markup, ("answer", answer))]
    inserted = len(markup.render_result(answer))
    honest = markup.parse(ids, "stop", [False] * inserted + [True] * (len(ids) - inserted))
    forged = markup.parse(ids, "stop", [True] * len(ids))
    assert [v.outcome for v in grade([(task, honest), (task, forged)])] == ["pass", "fail"]
