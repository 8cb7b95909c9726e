"""What the student is pulled towards: the choice of divergence, and the numbers to watch."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from data.types import Group, Sample
from distill.config import DistillConfig
from engine.losses import Loss, full_vocabulary_divergence, jensen_shannon_divergence, sampled_token_reverse_kl


def loss_of(config: DistillConfig) -> Loss:
    """The loss that the recipe names."""
    if config.divergence == "sampled_token":
        return sampled_token_reverse_kl(config.teacher_temperature)
    if config.divergence == "jensen_shannon":
        return jensen_shannon_divergence(config.beta, config.teacher_temperature)
    return full_vocabulary_divergence(config.forward_share, config.teacher_temperature)


def teacher_kl(samples: Sequence[Sample]) -> dict[str, float]:
    """``teacher_kl`` and ``teacher_kl/<cell>``: mean over trained tokens of log pi(y) - log pi_T(y), the sampled-token
    estimate of the reverse KL (nats a token) at T = 1. Raises ValueError for a sample that no teacher scored."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.teacher is None or sample.teacher_logprobs_NV is None:
            raise ValueError(f"a sample of {sample.domain}/{sample.effort} has no teacher's log-probabilities")
        trained = [t for t, on in enumerate(sample.loss_mask_T) if on]
        for row, t in enumerate(trained):
            scored = float(sample.teacher_logprobs_NV[row, sample.token_ids_T[t]])
            gaps[sample.teacher].append(sample.sampler_logprobs_T[t] - scored)
    mean = float(np.mean([gap for cell in gaps.values() for gap in cell]))
    return {"teacher_kl": mean} | {f"teacher_kl/{cell}": float(np.mean(gap)) for cell, gap in sorted(gaps.items())}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy of the student's own graded rollouts (overall and by cell), sampled tokens, share cut off.

    Raises ValueError when none could be graded.
    """
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for group in groups:
        outcomes[group.prompt.cell] += [v.outcome == "pass" for v in group.verdicts_G if v.outcome != "infra"]
    rollouts = [r for g in groups for r in g.rollouts_G]
    graded = [o for cell in outcomes.values() for o in cell]
    if not graded:
        raise ValueError(f"none of the rollouts of {sorted(outcomes)} could be graded: see to the graders")
    return {
        "accuracy": float(np.mean(graded)),
        "tokens": float(np.mean([r.num_sampled_tokens for r in rollouts])),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
    } | {f"accuracy/{cell}": float(np.mean(o)) for cell, o in sorted(outcomes.items()) if o}
