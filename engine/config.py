"""Configuration of the engine's stages. Imports nothing heavy: the control plane reads it."""

from typing import Literal

from pydantic import Field

from data.config import Config, PositiveInt, Probability


class ModelConfig(Config):
    """The shape of a Qwen3 causal LM made from random weights; its vocabulary is the tokenizer's."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt = 512


class OptimizerConfig(Config):
    """``muon`` updates matrices by Muon and everything else by AdamW at ``adam_lr``; ``adamw`` uses ``lr`` for all."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(gt=0)
    adam_lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear"] = "constant"


class MidtrainConfig(Config):
    """Supervised training from random weights on the corpus; the loss is on the assistant's own tokens."""

    model: ModelConfig
    optimizer: OptimizerConfig
    seed: int
    num_steps: PositiveInt
    batch_size: PositiveInt
    checkpoint_every: PositiveInt = 100
    tokens_per_micro_batch: PositiveInt = 4096


class BudgetConfig(Config):
    """Measures what the base spends per (domain, effort) and sets the effort's token budget from it.

    budget = ceil(scale[effort] x quantile[effort] of the sampled tokens of the base's finished rollouts at T = 1).
    """

    seed: int
    efforts: tuple[str, ...]
    num_tasks: PositiveInt
    quantile: dict[str, Probability]
    scale: dict[str, float]
    max_new_tokens: PositiveInt
    max_turns: PositiveInt


class EvaluateConfig(Config):
    """Held-out accuracy at T = 1 and greedy, the effort's token budget enforced.

    ``cells`` are scored in full; ``other_cells`` with ``num_tasks_other`` tasks at T = 1 only (the rest of an expert's
    row of the matrix).
    """

    seed: int
    cells: tuple[str, ...]
    other_cells: tuple[str, ...] = ()
    num_tasks: PositiveInt
    num_tasks_other: PositiveInt
    samples_per_task: PositiveInt
    max_turns: PositiveInt


class ExportConfig(Config):
    """The student as a Hugging Face folder with a model card."""

    name: str
