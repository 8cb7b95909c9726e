"""Configuration of one expert. Imports nothing heavy: the control plane reads it."""

from typing import Literal

from pydantic import Field

from data.config import Config, PositiveInt
from engine.config import OptimizerConfig


class ExpertConfig(Config):
    """GRPO of one (domain, effort) on verifiable rewards.

    Reward: 1 for a passed task, 0 for a failed one, ``over_budget_reward`` when the effort's token budget is exceeded.
    """

    domain: str
    effort: str
    seed: int
    optimizer: OptimizerConfig
    num_steps: PositiveInt
    prompts_per_step: PositiveInt
    group_size: int = Field(ge=2)
    objective: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    over_budget_reward: float = -1.0
    max_turns: PositiveInt = 8
    checkpoint_every: PositiveInt = 5
    tokens_per_micro_batch: PositiveInt = 4096
