"""Configuration of the merge. Imports nothing heavy: the control plane reads it."""

from typing import Literal

from pydantic import Field

from data.config import Config, PositiveInt, Probability
from engine.config import OptimizerConfig


class DistillConfig(Config):
    """Multi-teacher on-policy distillation, each rollout scored by the one teacher of its (domain, effort).

    ``divergence``: ``full_vocabulary`` is (1 - forward_share) x reverse KL + forward_share x forward KL over the whole
    vocabulary; ``jensen_shannon`` is JSD_beta over it (beta near 0 behaves as the forward, near 1 as the reverse KL);
    ``sampled_token`` is the policy gradient of the reverse KL on the sampled tokens.
    ``teacher_temperature`` < 1 sharpens the target: softmax(log pi_T / temperature).
    """

    seed: int
    cells: tuple[str, ...]
    optimizer: OptimizerConfig
    num_steps: PositiveInt
    prompts_per_cell: PositiveInt
    samples_per_prompt: PositiveInt = 1
    divergence: Literal["full_vocabulary", "jensen_shannon", "sampled_token"]
    forward_share: Probability = 0.0
    beta: Probability = 0.5
    teacher_temperature: float = Field(default=1.0, gt=0)
    max_turns: PositiveInt = 8
    checkpoint_every: PositiveInt = 5
    tokens_per_micro_batch: PositiveInt = 4096
