"""Episodes: whose words are whose, whose budget, whose verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from data.markup import Markup
from data.stages import load_tasks
from data.tasks import coding, general, research
from data.tokenizer import load_markup
from data.types import Group, Prompt, Segment, Task
from engine.embedded_sampler import EmbeddedSampler
from engine.episodes import run_episodes
from engine.sampler import Completion, Respond, SampleRequest, SamplingParams, Stopped
from engine.weights import load_model

BUDGETS = {f"{domain}/low": budget for domain, budget in (("coding", 40), ("general", 6), ("research", 30))}


@dataclass
class ScriptedSampler:
    """A policy that says what the script holds for each request: one list of tokens a turn, every sample alike."""

    script: Sequence[Sequence[Sequence[int]]]
    policy_version: int = 7
    calls: list[tuple[list[SampleRequest], SamplingParams]] = field(default_factory=list)

    def load(self, model: object, policy_version: int) -> None:
        self.policy_version = policy_version

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, respond: Respond | None = None
    ) -> list[list[Completion]]:
        assert respond is not None
        self.calls.append((list(requests), params))
        return [
            [self._complete(i, sample, request, respond) for sample in range(request.num_samples)]
            for i, request in enumerate(requests)
        ]

    def _complete(self, index: int, sample: int, request: SampleRequest, respond: Respond) -> Completion:
        ids: list[int] = []
        mask: list[bool] = []
        for turn, said in enumerate(self.script[index], start=1):
            said = said[: (request.max_new_tokens or 0) - sum(mask)]
            ids += said
            mask += [True] * len(said)
            if said != self.script[index][turn - 1]:
                return self._end(ids, mask, "length", turn)
            (inserted,) = respond([Stopped(index, sample, tuple(ids))])
            if inserted is None:
                return self._end(ids, mask, "stop", turn)
            ids += inserted
            mask += [False] * len(inserted)
        raise AssertionError(f"request {index} has no turn left in the script")

    def _end(self, ids: list[int], mask: list[bool], reason: str, turn: int) -> Completion:
        logprobs = tuple(-0.5 if sampled else 0.0 for sampled in mask)
        return Completion(tuple(ids), tuple(mask), logprobs, reason, turn)


def turns_of(markup: Markup, trace: Sequence[tuple[str, str]]) -> list[list[int]]:
    """What the assistant itself writes of a trace, turn by turn."""
    turns: list[list[tuple[str, str]]] = [[]]
    for channel, text in trace:
        if channel == "result":
            turns.append([])
        else:
            turns[-1].append((channel, text))
    return [markup.render_completion(turn)[0] for turn in turns]


def right_answer(task: Task) -> str:
    if task.domain == "general":
        return task.reference["answer"]
    state = task.reference["start"]
    for step in task.reference["steps"]:
        state = coding.OPERATIONS[step](state)
    return ",".join(state)


def search_trace(task: Task) -> list[tuple[str, str]]:
    """The searches that lead to the answer, each asked again when it fails, and the cited answer."""
    person, *relations = task.messages[-1].text.split(".")
    trace: list[tuple[str, str]] = []
    for relation in relations:
        query, found = f"{person}.{relation}", research.NOTHING
        history: list[str] = []
        while found == research.NOTHING:
            found = research.search(task, query, history)
            history.append(query)
            trace += [("call", query), ("result", found)]
        person = found.split("@")[0]
    return [*trace, ("answer", f"{task.reference['answer']}@{task.reference['document']}")]


def play(
    markup: Markup, tasks: Sequence[Task], traces: Sequence[Sequence[tuple[str, str]]], **options: int
) -> tuple[list[Group], ScriptedSampler]:
    sampler = ScriptedSampler([turns_of(markup, trace) for trace in traces])
    prompts = [markup.render_prompt(task, "low") for task in tasks]
    settings = {"num_samples": 2, "seed": 5, "max_turns": 12} | options
    return run_episodes(sampler, markup, prompts, budgets=BUDGETS, temperature=1.0, **settings), sampler


def research_task(num_hops: int) -> Task:
    tasks = (research.make_task(0, index, "train") for index in range(200))
    return next(t for t in tasks if t.messages[-1].text.count(".") == num_hops and not t.reference["fails"])


def test_domains_may_mix_and_every_prompt_keeps_its_budget_its_order_and_its_verdict(markup: Markup) -> None:
    tasks = [general.make_task(0, 0, "train"), coding.make_task(0, 1, "train"), research_task(1)]
    tasks += [general.make_task(0, 3, "train"), coding.make_task(0, 4, "train")]
    traces = [
        [("answer", right_answer(tasks[0]))],
        [("answer", "x")],
        search_trace(tasks[2]),
        [("answer", right_answer(tasks[3]))],
        [("answer", right_answer(tasks[4]))],
    ]
    groups, sampler = play(markup, tasks, traces)
    assert [g.prompt.task for g in groups] == tasks
    outcomes = [[v.outcome for v in g.verdicts_G] for g in groups]
    assert outcomes == [["pass"] * 2, ["fail"] * 2, ["pass"] * 2, ["pass"] * 2, ["pass"] * 2]
    requests, params = sampler.calls[0]
    assert len(sampler.calls) == 1
    assert [r.token_ids_T for r in requests] == [g.prompt.token_ids_T for g in groups]
    assert [r.max_new_tokens for r in requests] == [BUDGETS[g.prompt.cell] for g in groups] == [6, 40, 30, 6, 40]
    assert params == SamplingParams(1.0, 40, (markup.stop_id,), 5)


def test_a_rollout_tells_prompt_sampled_and_inserted_tokens_apart(markup: Markup) -> None:
    task = research_task(2)
    (group,), _ = play(markup, [task], [search_trace(task)], num_samples=3)
    assert len(group.rollouts_G) == len(group.verdicts_G) == 3
    prompt = markup.render_prompt(task, "low")
    expected_ids, expected_mask = markup.render_completion(search_trace(task))
    for rollout in group.rollouts_G:
        assert rollout.prompt_id == f"{task.id}@low"
        assert rollout.prompt_length == len(prompt.token_ids_T)
        assert rollout.token_ids_T == (*prompt.token_ids_T, *expected_ids)
        assert rollout.loss_mask_T == (*[False] * len(prompt.token_ids_T), *expected_mask)
        assert rollout.sampler_logprobs_T == tuple(-0.5 if on else 0.0 for on in rollout.loss_mask_T)
        assert rollout.segments == (Segment(len(prompt.token_ids_T), len(rollout.token_ids_T), 7),)
        assert rollout.num_turns == 3
        assert rollout.num_sampled_tokens == sum(expected_mask)
        assert rollout.finish_reason == "stop"


def test_a_tool_that_fails_once_can_be_asked_again(markup: Markup) -> None:
    tasks = (research.make_task(0, index, "train") for index in range(200))
    task = next(t for t in tasks if t.reference["fails"] and t.messages[-1].text.count(".") == 1)
    trace = search_trace(task)
    assert next(text for channel, text in trace if channel == "result") == research.NOTHING
    (group,), _ = play(markup, [task], [trace])
    assert [v.outcome for v in group.verdicts_G] == ["pass"] * 2
    assert {r.num_turns for r in group.rollouts_G} == {3}


@pytest.mark.parametrize("max_turns", [1, 2])
def test_after_the_last_turn_a_call_is_not_answered(markup: Markup, max_turns: int) -> None:
    task = research_task(2)  # two searches and an answer: three turns
    (group,), _ = play(markup, [task], [search_trace(task)], max_turns=max_turns)
    for rollout, verdict in zip(group.rollouts_G, group.verdicts_G, strict=True):
        assert rollout.num_turns == max_turns
        assert rollout.finish_reason == "stop"
        assert (verdict.outcome, verdict.reason) == ("fail", "no answer")


def test_whoever_spends_the_budget_ends_unanswered_and_fails(markup: Markup) -> None:
    task = general.make_task(0, 0, "train")
    trace = [("think", "1234567"), ("answer", right_answer(task))]
    (group,), _ = play(markup, [task], [trace])
    for rollout, verdict in zip(group.rollouts_G, group.verdicts_G, strict=True):
        assert rollout.finish_reason == "length"
        assert rollout.num_sampled_tokens == BUDGETS["general/low"] == 6
        assert (verdict.outcome, verdict.reward, verdict.reason) == ("fail", 0.0, "no answer")


def test_a_cell_without_a_budget_is_named(markup: Markup) -> None:
    prompt = markup.render_prompt(general.make_task(0, 0, "train"), "high")
    with pytest.raises(KeyError, match="general/high"):
        run_episodes(
            ScriptedSampler([]),
            markup,
            [prompt],
            num_samples=1,
            budgets=BUDGETS,
            temperature=1.0,
            seed=0,
            max_turns=1,
        )


def sample(base_path: Path, prompts: Sequence[Prompt], seed: int, temperature: float = 1.0) -> list[Group]:
    sampler = EmbeddedSampler()
    sampler.load(load_model(base_path), policy_version=3)
    return run_episodes(
        sampler,
        load_markup(base_path),
        prompts,
        num_samples=4,
        budgets={"research/max": 24, "general/max": 24},
        temperature=temperature,
        seed=seed,
        max_turns=3,
    )


@pytest.fixture(scope="module")
def prompts(base_path: Path, task_paths: dict[str, Path]) -> list[Prompt]:
    markup = load_markup(base_path)
    tasks = [t for d in ("research", "general") for t in load_tasks(task_paths[f"tasks/{d}"], "train")[:12]]
    return [markup.render_prompt(task, "max") for task in tasks]


def test_a_seed_repeats_itself_and_members_of_a_group_differ(base_path: Path, prompts: list[Prompt]) -> None:
    groups = sample(base_path, prompts, seed=1)
    assert sample(base_path, prompts, seed=1) == groups
    assert sample(base_path, prompts, seed=2) != groups
    assert sum(len({r.token_ids_T for r in g.rollouts_G}) > 1 for g in groups) > len(groups) / 2  # P22
    assert any(r.num_turns > 1 for g in groups for r in g.rollouts_G)


def test_stored_logprobs_are_those_of_the_model_at_the_very_tokens(base_path: Path, prompts: list[Prompt]) -> None:
    model = load_model(base_path)
    for group in sample(base_path, prompts, seed=1):
        for rollout in group.rollouts_G:
            ids = torch.tensor(rollout.token_ids_T)
            with torch.no_grad():
                logprobs_TV = model.logits(model(ids[None], torch.arange(len(ids))[None])[0]).log_softmax(-1)
            for t, sampled in enumerate(rollout.loss_mask_T):
                expected = float(logprobs_TV[t - 1, ids[t]]) if sampled else 0.0
                assert rollout.sampler_logprobs_T[t] == pytest.approx(expected, abs=1e-4)


def test_greedy_rollouts_of_one_prompt_are_one(base_path: Path, prompts: list[Prompt]) -> None:
    for group in sample(base_path, prompts, seed=1, temperature=0.0):
        assert len({r.token_ids_T for r in group.rollouts_G}) == 1


def test_infra_is_a_verdict_of_its_own(markup: Markup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unreachable_grader.py").write_text(
        "from data.types import Verdict\n"
        "def grade(pairs):\n    return [Verdict('infra', 0.0, reason='unreachable') for _ in pairs]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = general.make_task(0, 0, "train")
    broken = replace(task, grader="unreachable_grader:grade")
    groups, _ = play(markup, [task, broken], [[("answer", right_answer(task))]] * 2)
    assert [[v.outcome for v in g.verdicts_G] for g in groups] == [["pass"] * 2, ["infra"] * 2]
