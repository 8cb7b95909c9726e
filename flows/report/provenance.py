"""How the run was made: recipe, seed, identities of every stage, code, configuration, machine."""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flows.plan import flatten
from flows.report.inputs import Inputs, Stage

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
NAMES_A_STAGE = ("seed", "domain", "effort", "cells", "other_cells")
Figures = dict[str, Any]


def made_figures(inputs: Inputs, timeline: Sequence[Mapping[str, Any]]) -> Figures:
    """What the records say about the run, its stages in order of start, and the machine that this page is made on."""
    records = sorted((s.record for s in inputs.stages if s.record), key=lambda r: (r.get("started", 0.0), r["stage"]))
    created = max((r["created"] for r in records if "created" in r), default=None)
    return {
        "recipe": inputs.recipe or next((r["recipe"] for r in reversed(records) if "recipe" in r), ""),
        "seed": inputs.seed,
        "finished": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M UTC") if created else "",
        "work_s": sum(row["duration_s"] for row in timeline),
        "wall_s": max((row["end_s"] for row in timeline), default=0.0),
        "git_commits": _distinct(records, "git_commit"),
        "code": _distinct(records, "code"),
        "machine": machine(),
        "budgets": dict(inputs.budgets),
        "stages": list({record["stage"]: _stage_row(record) for record in records}.values()),
        "configs": {record["stage"]: record["config"] for record in records if record.get("config")},
    }


def settings(stages: Sequence[Stage]) -> list[Figures]:
    """The configuration by kind of stage: ``common`` (key, value) of all its stages, ``own`` (key, {value: names})."""
    kinds: dict[str, dict[str, dict[str, str]]] = {}
    for stage in stages:
        if stage.record.get("config"):
            kind, _, name = stage.name.partition("/")
            kinds.setdefault(kind, {})[name] = {k: _text(v) for k, v in flatten(stage.record["config"])}
    rows = []
    for kind, configs in kinds.items():
        common, own = [], []
        for key in dict.fromkeys(key for config in configs.values() for key in config):
            if key.rpartition(".")[2] in NAMES_A_STAGE:
                continue
            values: dict[str, list[str]] = {}
            for name, config in sorted(configs.items()):
                values.setdefault(config.get(key, "–"), []).append(name)
            if len(values) == 1:
                common.append((key, next(iter(values))))
            else:
                own.append((key, values))
        rows.append({"kind": kind, "num_stages": len(configs), "common": common, "own": own})
    return rows


def machine() -> Figures:
    """Processor, usable cores, memory, system and versions of this process's machine; nothing heavy is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    processor = _processor()
    text = f"{processor}, {cores} core{'' if cores == 1 else 's'}, {memory:.0f} GiB"
    system = f"{platform.system()} {platform.machine()}"
    return {
        "text": text,
        "processor": processor,
        "cores": cores,
        "memory_gib": round(memory, 1),
        "system": system,
        "versions": versions,
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _stage_row(record: Mapping[str, Any]) -> Figures:
    names = ("stage", "fingerprint", "result_id", "git_commit", "duration_s")
    return {name: record.get(name, "") for name in names}


def _distinct(records: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(record[name] for record in records if record.get(name)))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
