"""From verdicts to samples: an expert's reward, its advantage within the group, and the numbers to watch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.markup import Markup
from data.types import Group, Rollout, Sample, Verdict
from engine.advantages import dr_grpo, grpo, rloo
from experts.config import ExpertConfig

ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def reward_of(rollout: Rollout, verdict: Verdict, over_budget_reward: float) -> float:
    """The grader's reward; ``over_budget_reward`` for a rollout cut off at its effort's token budget (Kimi K3)."""
    return over_budget_reward if rollout.finish_reason == "length" else verdict.reward


def to_samples(group: Group, config: ExpertConfig) -> list[Sample]:
    """The group's rollouts with their advantages. Rollouts with an infra verdict are left out, of the baseline too."""
    return [
        Sample(
            token_ids_T=rollout.token_ids_T,
            loss_mask_T=rollout.loss_mask_T,
            sampler_logprobs_T=rollout.sampler_logprobs_T,
            advantages_T=tuple(advantage if trained else 0.0 for trained in rollout.loss_mask_T),
            domain=group.prompt.task.domain,
            effort=group.prompt.effort,
        )
        for rollout, verdict, advantage in zip(
            group.rollouts_G, group.verdicts_G, group_advantages(group, config), strict=True
        )
        if verdict.outcome != "infra"
    ]


def informative(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with a gradient: groups without variance are dropped (DAPO). All of them when none has one.

    Raises ValueError when there is no sample: no rollout of the step could be graded.
    """
    if not samples:
        raise ValueError("none of the step's rollouts could be graded: see to the grader, then run again")
    return [s for s in samples if any(s.advantages_T)] or list(samples)


def group_advantages(group: Group, config: ExpertConfig) -> list[float]:
    """One advantage a rollout; 0 for infra."""
    rewards_G = np.array([_reward(group, i, config) for i in range(len(group.rollouts_G))])
    infra_G = np.array([v.outcome == "infra" for v in group.verdicts_G])
    return [float(a) for a in ADVANTAGES[config.objective](rewards_G, infra_G)]


def rollout_metrics(groups: Sequence[Group], config: ExpertConfig) -> dict[str, float]:
    """Reward and accuracy of the graded rollouts (one at least); of all: sampled tokens, share cut off, share of groups
    with variance, share of infra verdicts."""
    rollouts = [r for g in groups for r in g.rollouts_G]
    verdicts = [v for g in groups for v in g.verdicts_G]
    graded = [(g, i) for g in groups for i, v in enumerate(g.verdicts_G) if v.outcome != "infra"]
    kept = [any(group_advantages(g, config)) for g in groups]
    return {
        "reward": float(np.mean([_reward(g, i, config) for g, i in graded])),
        "accuracy": float(np.mean([g.verdicts_G[i].outcome == "pass" for g, i in graded])),
        "tokens": float(np.mean([r.num_sampled_tokens for r in rollouts])),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "kept_groups": float(np.mean(kept)),
        "infra": float(np.mean([v.outcome == "infra" for v in verdicts])),
    }


def to_rows(markup: Markup, group: Group, step: int, config: ExpertConfig) -> list[dict[str, Any]]:
    """The group as rows of the stored rollouts."""
    advantages_G = group_advantages(group, config)
    return [
        {
            "step": step,
            "task_id": group.prompt.task.id,
            "domain": group.prompt.task.domain,
            "effort": group.prompt.effort,
            "outcome": verdict.outcome,
            "reward": _reward(group, i, config),
            "num_tokens": rollout.num_sampled_tokens,
            "advantage": advantages_G[i],
            "prompt": markup.decode(rollout.token_ids_T[: rollout.prompt_length]),
            "completion": markup.decode(rollout.token_ids_T[rollout.prompt_length :]),
        }
        for i, (rollout, verdict) in enumerate(zip(group.rollouts_G, group.verdicts_G, strict=True))
    ]


def _reward(group: Group, i: int, config: ExpertConfig) -> float:
    return reward_of(group.rollouts_G[i], group.verdicts_G[i], config.over_budget_reward)
