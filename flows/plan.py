"""What a run would do, and why: one StagePlan a stage, from the graph and the store alone."""

import ast
import importlib.util
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from flows.graph import Graph
from flows.recipe import Recipe
from flows.specs import StageResult, StageSpec
from flows.store import Store

Status = Literal["run", "cached", "waits"]


@dataclass(frozen=True, slots=True)
class Change:
    """A configuration key whose value differs from the last result's; ``None`` where there is no such key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """``estimate_s`` is the duration of the last run of this stage in this recipe, where there is one."""

    spec: StageSpec
    status: Status
    reason: str
    changes: tuple[Change, ...] = ()
    result: StageResult | None = None
    estimate_s: float | None = None


def make_plan(
    graph: Graph,
    store: Store,
    recipe: str,
    code: str,
    forced: Set[str] = frozenset(),
    check: Literal["quick", "full"] = "quick",
) -> dict[str, StagePlan]:
    """Cached: an intact result of exactly this work is there. Run: its inputs are there. Waits: an input is not."""
    plans: dict[str, StagePlan] = {}
    for name, spec in graph.items():
        last = _last_result(store, name, recipe)
        changes = compare_configs(last.config, spec.config) if last is not None else ()
        missing = [stage for stage in dict.fromkeys(spec.inputs.values()) if plans[stage].status != "cached"]
        if missing:
            status, reason, result = _waiting(missing, name in forced)
        else:
            inputs = {role: made for role, stage in spec.inputs.items() if (made := plans[stage].result) is not None}
            status, reason, result = _ready(store, spec, inputs, last, code, check, forced=name in forced)
        if changes and status != "cached":
            reason = f"changed {changes[0]}" + (f" (and {len(changes) - 1} more)" if len(changes) > 1 else "")
        plans[name] = StagePlan(spec, status, reason, changes, result, last.duration_s if last is not None else None)
    return plans


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """The leaves that differ, by dotted key, sorted."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = sorted(before.keys() | after.keys())
    return tuple(Change(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k))


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables as (dotted key, value); lists stay whole."""
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        rows += flatten(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return rows


def check_functions(recipe: Recipe) -> None:
    """Every dotted path names a function that exists; nothing is imported. Raises ValueError naming the key."""
    paths = {f"functions.{kind}": path for kind, path in recipe.functions.items()}
    for domain, section in recipe.domains.items():
        paths[f"domains.{domain}.generator"] = section.generator
        paths[f"domains.{domain}.traces"] = section.traces
    for key, path in paths.items():
        module, _, name = path.partition(":")
        names = _names_in(module)
        if names is None:
            raise ValueError(f"{key} = {path}: there is no module {module}; write package.module:function")
        if name not in names:
            raise ValueError(f"{key} = {path}: {module} has no {name}; it has {', '.join(sorted(names))}")


@lru_cache(maxsize=64)
def _names_in(module: str) -> frozenset[str] | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    names: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(n for n in names if not n.startswith("_"))


def _last_result(store: Store, stage: str, recipe: str) -> StageResult | None:
    results = [result for result in store.results(stage) if result.recipe == recipe]
    return results[-1] if results else None


def _waiting(missing: list[str], forced: bool) -> tuple[Status, str, None]:
    shown = ", ".join(missing[:2]) + (f" and {len(missing) - 2} more" if len(missing) > 2 else "")
    return "waits", f"for {shown}" + (", then forced" if forced else ""), None


def _ready(
    store: Store,
    spec: StageSpec,
    inputs: Mapping[str, StageResult],
    last: StageResult | None,
    code: str,
    check: Literal["quick", "full"],
    *,
    forced: bool,
) -> tuple[Status, str, StageResult | None]:
    fingerprint = spec.fingerprint({role: result.result_id for role, result in inputs.items()})
    found = store.find(spec.name, fingerprint, check=check)
    if forced:
        return "run", "forced", None
    if found is not None:
        return "cached", "" if found.code == code else "made by other code", found
    unfinished = store.unfinished(spec.name, fingerprint, code)
    if unfinished is not None:
        return "run", f"unfinished: goes on with attempt {unfinished.name}", None
    if (wrong := store.find_damage(spec.name, fingerprint)) is not None:
        return "run", wrong, None
    return "run", "not run yet" if last is None else _difference(spec, inputs, last), None


def _difference(spec: StageSpec, inputs: Mapping[str, StageResult], last: StageResult) -> str:
    """Why the last result does not count any more, its configuration aside."""
    if (last.function, last.version) != (spec.function, spec.version):
        return f"stage version: {last.function} v{last.version} → {spec.function} v{spec.version}"
    for role, result in inputs.items():
        old = last.inputs.get(role)
        if old != result.result_id:
            return f"new input {role}: {(old or 'none')[:12]} → {result.result_id[:12]}"
    gone = sorted(set(last.inputs) - set(inputs))
    return f"input {gone[0]} is gone" if gone else "other configuration"
