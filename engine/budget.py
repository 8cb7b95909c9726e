"""The token budget of every (domain, effort), measured from what the base itself spends (Kimi K3's b0, per cell)."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.stage import StageRequest
from data.stages import load_tasks
from data.tokenizer import load_markup
from data.types import Group
from engine.config import BudgetConfig
from engine.embedded_sampler import EmbeddedSampler
from engine.episodes import run_episodes
from engine.metrics import seed_for
from engine.weights import load_model


def measure(request: StageRequest) -> dict[str, float]:
    """Samples the ``model`` input on train tasks of every ``tasks/<domain>`` input; writes ``output/budgets.json``."""
    config = BudgetConfig.model_validate(request.config)
    folder = request.input("model")
    markup = load_markup(folder)
    sampler = EmbeddedSampler()
    sampler.load(load_model(folder), policy_version=0)
    budgets: dict[str, int] = {}
    for role in sorted(r for r in request.inputs if r.startswith("tasks/")):
        tasks = load_tasks(request.inputs[role], "train")[: config.num_tasks]
        for effort in config.efforts:
            prompts = [markup.render_prompt(task, effort) for task in tasks]
            cell = prompts[0].cell
            groups = run_episodes(
                sampler,
                markup,
                prompts,
                num_samples=1,
                budgets={cell: config.max_new_tokens},
                temperature=1.0,
                seed=seed_for(config.seed, cell),
                max_turns=config.max_turns,
            )
            budgets[cell] = budget_of(groups, config.quantile[effort], config.scale[effort])
    request.output_path.mkdir(parents=True, exist_ok=True)
    (request.output_path / "budgets.json").write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
    return {f"budget/{cell}": float(budget) for cell, budget in budgets.items()}


def budget_of(groups: Sequence[Group], quantile: float, scale: float) -> int:
    """ceil(scale x quantile of the sampled tokens of finished rollouts). Raises ValueError when none finished."""
    lengths = [r.num_sampled_tokens for g in groups for r in g.rollouts_G if r.finish_reason == "stop"]
    if not lengths:
        cell = groups[0].prompt.cell
        raise ValueError(f"the base finished no rollout of {cell}: train it longer or raise budget.max_new_tokens")
    return math.ceil(scale * float(np.quantile(lengths, quantile, method="higher")))


def load_budgets(folder: Path) -> Mapping[str, int]:
    """Budgets by cell, from the output folder of a budget stage."""
    budgets: dict[str, int] = json.loads((folder / "budgets.json").read_text())
    return budgets
