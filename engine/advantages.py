"""Group advantages of verifiable rewards: pure functions over the rollouts of one prompt.

Legend: G group size; leading axes, where there are any, are prompts. ``infra_G`` marks rollouts whose grader failed
for reasons of its own: they leave the baseline, and their advantage is 0 (the caller drops them from the loss).
"""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

STD_FLOOR = 1e-4


def grpo(rewards_G: Float[ndarray, "*p g"], infra_G: Bool[ndarray, "*p g"] | None = None) -> Float[ndarray, "*p g"]:
    """(r - mean) / (std + 1e-4) within the group, population std (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    centred_G, valid_G, num_valid = _centre(rewards_G, infra_G)
    variance = (centred_G**2).sum(-1, keepdims=True) / np.maximum(num_valid, 1)
    return np.where(valid_G, centred_G / (np.sqrt(variance) + STD_FLOOR), 0.0)


def dr_grpo(rewards_G: Float[ndarray, "*p g"], infra_G: Bool[ndarray, "*p g"] | None = None) -> Float[ndarray, "*p g"]:
    """r - mean within the group, without the division by std (Dr. GRPO, arXiv 2503.20783)."""
    return _centre(rewards_G, infra_G)[0]


def rloo(rewards_G: Float[ndarray, "*p g"], infra_G: Bool[ndarray, "*p g"] | None = None) -> Float[ndarray, "*p g"]:
    """r - mean of the *other* rollouts = G/(G-1) (r - mean), G counting valid rollouts (arXiv 2402.14740)."""
    centred_G, _, num_valid = _centre(rewards_G, infra_G)
    advantages_G: ndarray = centred_G * num_valid / np.maximum(num_valid - 1, 1)
    return advantages_G


def _centre(
    rewards_G: Float[ndarray, "*p g"], infra_G: Bool[ndarray, "*p g"] | None
) -> tuple[Float[ndarray, "*p g"], Bool[ndarray, "*p g"], Float[ndarray, "*p 1"]]:
    """Rewards minus the mean of the valid ones, 0 elsewhere and *exactly* 0 in a group without variance.

    Raises ValueError when the shapes differ or a valid reward is not finite.
    """
    valid_G = np.ones(rewards_G.shape, bool) if infra_G is None else ~np.asarray(infra_G, bool)
    if valid_G.shape != rewards_G.shape:
        raise ValueError(f"infra mask has shape {valid_G.shape}, the rewards {rewards_G.shape}")
    if not np.isfinite(rewards_G[valid_G]).all():
        raise ValueError(f"rewards of graded rollouts must be finite: {rewards_G.tolist()}")
    num_valid = valid_G.sum(-1, keepdims=True).astype(np.float64)
    known_G = np.where(valid_G, rewards_G, 0.0).astype(np.float64)
    mean = known_G.sum(-1, keepdims=True) / np.maximum(num_valid, 1)
    highest = np.where(valid_G, known_G, -np.inf).max(-1, keepdims=True)
    lowest = np.where(valid_G, known_G, np.inf).min(-1, keepdims=True)
    return np.where(valid_G & (highest > lowest), known_G - mean, 0.0), valid_G, num_valid
