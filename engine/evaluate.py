"""Evaluation of one model on held-out tasks: a row of the matrix (domain, effort), at T = 1 and greedy."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.arrow import save_rows
from data.markup import Markup
from data.stage import StageRequest
from data.stages import load_tasks
from data.statistics import bootstrap_mean, pass_at_k
from data.tokenizer import load_markup
from data.types import Group, Task
from engine.budget import load_budgets
from engine.config import EvaluateConfig
from engine.embedded_sampler import EmbeddedSampler
from engine.episodes import run_episodes
from engine.metrics import seed_for
from engine.weights import load_model

NUM_BOOTSTRAP = 2000


def evaluate(request: StageRequest) -> dict[str, float]:
    """Scores the ``model`` input; writes ``output/cells.json`` and every rollout, ``output/rollouts`` (a data set)."""
    config = EvaluateConfig.model_validate(request.config)
    folder = request.input("model")
    markup = load_markup(folder)
    sampler = EmbeddedSampler()
    sampler.load(load_model(folder), policy_version=0)
    budgets = load_budgets(request.input("budget"))
    tests = {
        domain: load_tasks(request.input(f"tasks/{domain}"), "test")
        for domain in sorted({cell.split("/")[0] for cell in (*config.cells, *config.other_cells)})
    }
    cells: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for cell in (*config.cells, *config.other_cells):
        full = cell in config.cells
        tasks = tests[cell.split("/")[0]][: config.num_tasks if full else config.num_tasks_other]
        cells[cell] = {}
        for mode in ("sampled", "greedy") if full else ("sampled",):
            groups = _sample(sampler, markup, tasks, cell, mode, config, budgets[cell])
            cells[cell][mode] = score(groups)
            rows += [row for group in groups for row in _rows(markup, group, mode)]
    request.output_path.mkdir(parents=True, exist_ok=True)
    (request.output_path / "cells.json").write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
    save_rows(rows, request.output_path / "rollouts")
    return {f"accuracy/{cell}": cells[cell]["sampled"]["accuracy"] for cell in config.cells}


def _sample(
    sampler: EmbeddedSampler,
    markup: Markup,
    tasks: Sequence[Task],
    cell: str,
    mode: str,
    config: EvaluateConfig,
    budget: int,
) -> list[Group]:
    return run_episodes(
        sampler,
        markup,
        [markup.render_prompt(task, cell.split("/")[1]) for task in tasks],
        num_samples=config.samples_per_task if mode == "sampled" else 1,
        budgets={cell: budget},
        temperature=1.0 if mode == "sampled" else 0.0,
        seed=seed_for(config.seed, cell, mode),
        max_turns=config.max_turns,
    )


def score(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy with its 95 % interval (bootstrap over tasks), mean sampled tokens, share cut off, unbiased pass@k.

    Rollouts with an infra verdict count neither way; a task that has no other is left out. Raises ValueError when no
    task is left.
    """
    graded = [[v.outcome == "pass" for v in g.verdicts_G if v.outcome != "infra"] for g in groups]
    correct_PG = [row for row in graded if row]
    if not correct_PG:
        reason = groups[0].verdicts_G[0].reason
        raise ValueError(f"no rollout of {groups[0].prompt.cell} could be graded ({reason}): see to its grader")
    rollouts = [r for g in groups for r in g.rollouts_G]
    accuracy, low, high = bootstrap_mean([float(np.mean(row)) for row in correct_PG], NUM_BOOTSTRAP, seed=0)
    num_samples = max(len(row) for row in correct_PG)
    ks = [k for k in (1, 2, 4, 8, 16) if k <= num_samples]
    return {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "tokens": float(np.mean([r.num_sampled_tokens for r in rollouts])),
        "num_tasks": len(correct_PG),
        "samples_per_task": num_samples,
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "infra": len(rollouts) - sum(len(row) for row in correct_PG),
        "pass_at_k": {
            str(k): float(np.mean([pass_at_k(len(row), sum(row), k) for row in correct_PG if len(row) >= k]))
            for k in ks
        },
    }


def _rows(markup: Markup, group: Group, mode: str) -> list[dict[str, Any]]:
    prompt = group.prompt
    return [
        {
            "task_id": prompt.task.id,
            "domain": prompt.task.domain,
            "effort": prompt.effort,
            "mode": mode,
            "sample": sample,
            "outcome": verdict.outcome,
            "reward": verdict.reward,
            "num_tokens": rollout.num_sampled_tokens,
            "prompt": markup.decode(prompt.token_ids_T),
            "completion": markup.decode(rollout.token_ids_T[rollout.prompt_length :]),
            "answer": str(prompt.task.reference.get("answer", "")),
            "reason": verdict.reason,
            "tier": verdict.tier,
        }
        for sample, (rollout, verdict) in enumerate(zip(group.rollouts_G, group.verdicts_G, strict=True))
    ]
