"""A made-up but realistic run: evaluations, stored rollouts, logs and records of 3 domains x 3 efforts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.arrow import save_rows
from data.stage import StageRequest
from data.statistics import bootstrap_mean
from flows.report.page import build

DOMAINS, EFFORTS = ("coding", "research", "general"), ("low", "high", "max")
CELLS = tuple(f"{domain}/{effort}" for domain in DOMAINS for effort in EFFORTS)
BASE = dict(zip(CELLS, (0.27, 0.49, 0.52, 0.21, 0.25, 0.29, 0.27, 0.41, 0.48), strict=True))
EXPERT = dict(zip(CELLS, (0.45, 0.69, 0.84, 0.35, 0.63, 0.96, 0.29, 0.62, 0.79), strict=True))  # general/low: no gap
TOKENS = dict(zip(CELLS, (5.0, 11.8, 17.2, 7.1, 8.2, 9.6, 3.0, 5.2, 10.3), strict=True))
NUM_TASKS, NUM_SAMPLES, START = 60, 2, 1_764_000_000.0
COMPLETIONS = {
    "coding": ("<|think|>=cab.rot=abc.back={0}<|answer|>{1}<|end|>", "f=cab.rot.back.copy"),
    "research": (
        "<|call|>Ann.friend<|end|><|result|>Bo@k<|assistant|><|call|>{0}.boss<|end|><|result|>Cy@d<|assistant|>"
        "<|answer|>{1}<|end|>",
        "Ann.friend.boss",
    ),
    "general": ("<|think|>7+5=2*3={0}<|answer|>{1}<|end|>", "7+5*3<script>alert(1)</script>"),
}


def skill(model: str, cell: str) -> float:
    """How often a model is right in a cell; an expert elsewhere is a little better than the base in its own domain."""
    if model == "base":
        return BASE[cell]
    if model == "student":
        return BASE[cell] + 0.95 * (EXPERT[cell] - BASE[cell])
    near = 0.4 if model.split("/")[0] == cell.split("/")[0] else 0.0
    return EXPERT[cell] if model == cell else BASE[cell] + near * (EXPERT[cell] - BASE[cell])


def rollout_rows(model: str, cell: str, mode: str, num_tasks: int) -> list[dict[str, Any]]:
    """A task's difficulty is the same for every model, so that models are related as in a real run."""
    domain, effort = cell.split("/")
    rows = []
    for task in range(num_tasks):
        difficulty = random.Random(f"{domain}/{task}").random()
        for sample in range(NUM_SAMPLES if mode == "sampled" else 1):
            rng = random.Random(f"{model}/{cell}/{mode}/{task}/{sample}")
            passed = (0.5 * difficulty + 0.5 * rng.random()) < skill(model, cell)
            completion, question = COMPLETIONS[domain]
            rows.append(
                {
                    "task_id": f"{domain}-test-{task}",
                    "domain": domain,
                    "effort": effort,
                    "mode": mode,
                    "sample": sample,
                    "outcome": "infra" if task == 7 and sample else "pass" if passed else "fail",
                    "reward": float(passed),
                    "num_tokens": max(1, round(rng.gauss(TOKENS[cell], 1) * (0.7 if model == "base" else 1))),
                    "prompt": f"<|system|>{effort} {domain}<|user|>{question}<|assistant|>",
                    "completion": completion.format(*(("bca", "b,c,a") if passed else ("abc", "a,b,c"))),
                    "answer": "",
                    "reason": "" if passed else "wrong on 2 of 3 inputs",
                    "tier": "process",
                }
            )
    return rows


def score(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tasks = sorted({row["task_id"] for row in rows})
    graded = [[r["outcome"] == "pass" for r in rows if r["task_id"] == t and r["outcome"] != "infra"] for t in tasks]
    accuracy, low, high = bootstrap_mean([float(np.mean(row)) for row in graded], 400, seed=0)
    return {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "tokens": float(np.mean([row["num_tokens"] for row in rows])),
        "num_tasks": len(tasks),
        "samples_per_task": NUM_SAMPLES,
        "truncated": 0.02,
        "infra": 0,
        "pass_at_k": {"1": accuracy, "2": min(1.0, accuracy * 1.2)},
    }


def write_evaluation(folder: Path, model: str) -> None:
    cells: dict[str, Any] = {}
    stored = []
    for cell in CELLS:
        full = model in ("base", "student", cell)
        cells[cell] = {}
        for mode in ("sampled", "greedy") if full else ("sampled",):
            rows = rollout_rows(model, cell, mode, NUM_TASKS if full else 10)
            cells[cell][mode] = score(rows)
            stored += rows
    folder.mkdir(parents=True)
    (folder / "cells.json").write_text(json.dumps(cells, sort_keys=True))
    save_rows(stored, folder / "rollouts")


def write_training(folder: Path, cell: str, num_steps: int = 25) -> None:
    rows = []
    for step in (5, num_steps):
        for i, row in enumerate(rollout_rows(cell, cell, "greedy", 8)):
            kept = {k: row[k] for k in ("domain", "effort", "outcome", "reward", "num_tokens", "prompt", "completion")}
            rows.append({"step": step, "task_id": f"t{i // 8}", "advantage": row["reward"] - 0.5, **kept})
    folder.mkdir(parents=True)
    save_rows(rows, folder / "rollouts")
    rng = random.Random(cell)
    curve = []
    for step in range(1, num_steps + 1):
        done = 1 - np.exp(-step / 8)
        reward = BASE[cell] + done * (EXPERT[cell] - BASE[cell]) + rng.gauss(0, 0.02)
        row = {"reward": reward, "accuracy": reward, "tokens": TOKENS[cell] * (0.7 + 0.3 * done) + rng.gauss(0, 0.1)}
        row |= {"truncated": 0.1 * (1 - done), "entropy": 0.6 * (1 - 0.6 * done), "sampler_kl": 1e-9 * rng.random()}
        row |= {"grad_norm": 0.4 + rng.random() * 0.3, "kept_groups": 0.6, "infra": 0.0}
        curve.append({"step": step, "time_s": START + step, **row})
    write_metrics(folder.parent, curve)


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_record(folder: Path, stage: str, start_s: float, duration_s: float, **config: Any) -> None:
    row = {"stage": stage, "started": START + start_s, "created": START + start_s + duration_s}
    row |= {"duration_s": duration_s, "recipe": "quickstart", "git_commit": "0123456789abcdef", "config": config}
    row |= {"code": "c0de", "fingerprint": f"fingerprint of {stage}", "result_id": f"result of {stage}"}
    (folder / "record.json").write_text(json.dumps(row))


def write_logs(root: Path) -> None:
    """A falling loss of the base, a falling KL of the student to each of its teachers."""
    rng = random.Random(0)
    loss: list[dict[str, Any]] = []
    for step in range(1, 1001):
        left = np.exp(-step / 150)
        row = {"loss": 3.5 * left + 0.8 + rng.gauss(0, 0.02), "token_accuracy": 0.75 - 0.5 * left}
        loss.append({"step": step, "time_s": 0.0, "grad_norm": 0.5 + rng.random(), **row})
    write_metrics(root / "m", loss)
    merge = []
    for step in range(1, 31):
        left = np.exp(-step / 7)
        row = {
            "step": step,
            "time_s": 0.0,
            "grad_norm": 0.6 + 0.1 * rng.random(),
            "truncated": 0.02,
            "sampler_kl": 1e-9,
        }
        row |= {"entropy": 0.4 - step * 0.004, "tokens": 7 + step * 0.05, "accuracy": 0.66 - 0.3 * left}
        row |= {f"teacher_kl/{c}": (0.1 + EXPERT[c] - BASE[c]) * left + 0.003 * rng.random() for c in CELLS}
        merge.append(row)
    write_metrics(root / "d", merge)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> StageRequest:
    """The request of the report stage of that run."""
    root = tmp_path_factory.mktemp("store")
    folders = {"base": "eb", "student": "es", "midtrain": "m", "distill": "d", "budget": "b"}
    inputs = {role: root / name / "output" for role, name in folders.items()}
    for role in ("midtrain", "distill", "budget"):
        inputs[role].mkdir(parents=True)
    (inputs["budget"] / "budgets.json").write_text(json.dumps({cell: 2 * round(TOKENS[cell]) for cell in CELLS}))
    write_record(root / "b", "budget", 104, 2, quantile=0.75)
    for role in ("base", "student"):
        write_evaluation(inputs[role], role)
    write_logs(root)
    write_record(root / "m", "midtrain", 0, 104)
    write_record(root / "eb", "evaluate/base", 110, 11, cells=CELLS)
    for i, cell in enumerate(sorted(CELLS, key=lambda c: -EFFORTS.index(c.split("/")[1]))):
        inputs[f"expert/{cell}"] = root / "ee" / cell / "output"
        inputs[f"rollouts/{cell}"] = root / "x" / cell / "output"
        write_evaluation(inputs[f"expert/{cell}"], cell)
        write_training(inputs[f"rollouts/{cell}"], cell)
        optimizer = {"lr": 1e-3 if cell.endswith("low") else 6e-4, "betas": [0.9, 0.95]}
        config = {"effort": cell.split("/")[1], "seed": i, "optimizer": optimizer}
        write_record(root / "x" / cell, f"expert/{cell}", 106 + 8 * (i // 2) + i % 2, 8 + i % 3, **config)
        write_record(root / "ee" / cell, f"evaluate/{cell}", 144 + 4 * (i // 2), 4.2)
    write_record(root / "d", "distill", 7200, 31)
    write_record(root / "es", "evaluate/student", 7232, 11, cells=CELLS)
    return StageRequest(
        "report", "report", {"recipe": "quickstart", "seed": 3}, dict(sorted(inputs.items())), root / "report"
    )


@pytest.fixture(scope="session")
def built(run: StageRequest) -> tuple[dict[str, Any], str, dict[str, float]]:
    """Figures, page and metrics of its report."""
    metrics = build(run)
    output = run.output_path
    return json.loads((output / "report.json").read_text()), (output / "report.html").read_text(), metrics
