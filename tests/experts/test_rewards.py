"""From verdicts to samples, by hand: advantages, the budget's penalty, infra left out, groups that teach nothing."""

from dataclasses import replace

import pytest

from data.markup import Markup
from data.tasks import general
from data.types import Group, Rollout, Verdict
from experts.config import ExpertConfig
from experts.rewards import group_advantages, informative, reward_of, rollout_metrics, to_rows, to_samples

CONFIG = ExpertConfig(
    domain="general",
    effort="high",
    seed=0,
    optimizer={"lr": 1e-3},
    num_steps=1,
    prompts_per_step=1,
    group_size=4,
)
NAMES = {"p": "pass", "f": "fail", "i": "infra"}


def group_of(markup: Markup, outcomes: str, cut_off: str = "") -> Group:
    """A group by its outcomes' letters (p, f, i); where ``cut_off`` has an x, the budget was spent."""
    task = general.make_task(0, 0, "train")
    prompt = markup.render_prompt(task, "high")
    length = len(prompt.token_ids_T)
    inserted = markup.render_result("Bo@k")
    said = markup.render_completion([("answer", "7")])[0]
    rollouts = []
    for i, _ in enumerate(outcomes):
        own = said[: 2 + i % 2]  # of two lengths
        ids = (*prompt.token_ids_T, *own, *inserted, *own)
        mask = (*[False] * length, *[True] * len(own), *[False] * len(inserted), *[True] * len(own))
        logprobs = tuple(-0.1 * (t + 1) if on else 0.0 for t, on in enumerate(mask))
        reason = "length" if cut_off[i : i + 1] == "x" else "stop"
        rollouts.append(Rollout(prompt.id, length, ids, mask, logprobs, (), reason, 2))
    verdicts = [Verdict(NAMES[letter], float(letter == "p")) for letter in outcomes]
    return Group(prompt, tuple(rollouts), tuple(verdicts))


def test_reward_is_the_verdicts_and_the_budget_is_hard(markup: Markup) -> None:
    group = group_of(markup, "pfpf", cut_off="  xx")
    rewards = [
        reward_of(r, v, over_budget_reward=-0.5) for r, v in zip(group.rollouts_G, group.verdicts_G, strict=True)
    ]
    assert rewards == [1.0, 0.0, -0.5, -0.5]


@pytest.mark.parametrize(
    ("outcomes", "cut_off", "objective", "expected"),
    [
        ("pfff", "", "dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("pfff", "", "rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),  # G / (G - 1) of the centred
        ("pfff", "", "grpo", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),  # sqrt((1 - p) / p) at p = 1/4
        ("ppff", "   x", "dr_grpo", [0.75, 0.75, -0.25, -1.25]),  # 1, 1, 0 and -1
        ("pfii", "", "dr_grpo", [0.5, -0.5, 0.0, 0.0]),  # the baseline is of two
        ("pfii", "", "grpo", [1.0, -1.0, 0.0, 0.0]),
        ("pfif", "  x ", "dr_grpo", [2 / 3, -1 / 3, 0.0, -1 / 3]),  # infra stays infra, cut off or not
        ("pppp", "", "grpo", [0.0] * 4),
        ("ffff", "xxxx", "grpo", [0.0] * 4),
        ("iiii", "", "grpo", [0.0] * 4),
    ],
)
def test_advantages_by_hand(markup: Markup, outcomes: str, cut_off: str, objective: str, expected: list[float]) -> None:
    config = CONFIG.model_copy(update={"objective": objective})
    assert group_advantages(group_of(markup, outcomes, cut_off), config) == pytest.approx(expected, abs=1e-3)


def test_a_sample_is_its_rollout_with_the_advantage_on_its_own_tokens_alone(markup: Markup) -> None:
    group = group_of(markup, "pff")
    samples = to_samples(group, CONFIG.model_copy(update={"objective": "dr_grpo"}))
    for sample, rollout, advantage in zip(samples, group.rollouts_G, [2 / 3, -1 / 3, -1 / 3], strict=True):
        assert sample.token_ids_T == rollout.token_ids_T
        assert sample.loss_mask_T == rollout.loss_mask_T
        assert sample.sampler_logprobs_T == rollout.sampler_logprobs_T
        assert sample.advantages_T == pytest.approx([advantage if on else 0.0 for on in rollout.loss_mask_T])
        assert (sample.domain, sample.effort, sample.teacher_logprobs_NV) == ("general", "high", None)


def test_infra_leaves_the_loss_and_the_baseline(markup: Markup) -> None:
    with_infra, without = group_of(markup, "pfif"), group_of(markup, "pff")
    without = replace(without, rollouts_G=(*with_infra.rollouts_G[:2], with_infra.rollouts_G[3]))
    assert to_samples(with_infra, CONFIG) == to_samples(without, CONFIG)
    assert to_samples(group_of(markup, "iiii"), CONFIG) == []


def test_only_samples_with_a_gradient_are_trained_unless_there_is_none(markup: Markup) -> None:
    lively, dead = to_samples(group_of(markup, "pfff"), CONFIG), to_samples(group_of(markup, "pppp"), CONFIG)
    assert informative([*dead, *lively, *dead]) == lively
    assert informative(dead) == dead
    with pytest.raises(ValueError, match="could be graded"):
        informative(to_samples(group_of(markup, "iiii"), CONFIG))


def test_metrics_by_hand_with_infra_in_none_but_its_own(markup: Markup) -> None:
    groups = [group_of(markup, "pfff", "   x"), group_of(markup, "ffff"), group_of(markup, "ppii")]
    metrics = rollout_metrics(groups, CONFIG)
    assert metrics["reward"] == pytest.approx((1 + 0 + 0 - 1 + 0 + 1 + 1) / 10)
    assert metrics["accuracy"] == pytest.approx(3 / 10)
    assert metrics["infra"] == pytest.approx(2 / 12)
    assert metrics["truncated"] == pytest.approx(1 / 12)
    assert metrics["tokens"] == pytest.approx((4 + 6) / 2)
    assert metrics["kept_groups"] == pytest.approx(1 / 3)


def test_stored_rows_can_be_read(markup: Markup) -> None:
    rows = to_rows(markup, group_of(markup, "pf"), 3, CONFIG)
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert [row["advantage"] for row in rows] == pytest.approx([1.0, -1.0], abs=1e-3)
    assert rows[1] | {"advantage": None} == {
        "step": 3,
        "task_id": "general-train-0",
        "domain": "general",
        "effort": "high",
        "outcome": "fail",
        "reward": 0.0,
        "num_tokens": 6,
        "advantage": None,
        "prompt": f"<|system|>high general<|user|>{general.make_task(0, 0, 'train').messages[-1].text}<|assistant|>",
        "completion": "<|answer|>7<|end|><|result|>Bo@k<|assistant|><|answer|>7<|end|>",
    }
