"""A recipe: TOML in, a frozen and fully checked description of one run out."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data.config import Config, CorpusConfig, DomainSource, DottedPath, PositiveInt
from distill.config import DistillConfig
from engine.config import BudgetConfig, EvaluateConfig, ExportConfig, MidtrainConfig
from experts.config import ExpertConfig
from flows.specs import KINDS
from flows.validation import dotted, merge, nearest, validate, without

_NAME = r"^[a-z0-9][a-z0-9_-]*$"

# Sections are the stages' own configurations, less what the graph fills in for each stage.
CorpusSection = without(CorpusConfig, ["domains", "efforts", "seed"])
MidtrainSection = without(MidtrainConfig, ["seed"])
BudgetSection = without(BudgetConfig, ["seed", "efforts"])
ExpertSection = without(ExpertConfig, ["domain", "effort", "seed"], start=(Literal["base", "next_effort"], "base"))
DistillSection = without(DistillConfig, ["seed", "cells"], cells=(tuple[str, ...], ()))
EvaluateSection = without(EvaluateConfig, ["seed", "cells", "other_cells"])


class DomainSection(DomainSource):
    """One domain: its functions, its share of the corpus and the sizes of its splits."""

    num_train: PositiveInt
    num_test: PositiveInt


class ResourcesSection(Config):
    """Outside every stage's identity. ``num_slots`` threads in all; a stage takes as many slots as it has threads."""

    num_slots: PositiveInt = 2
    threads: dict[str, PositiveInt] = Field(default_factory=dict)


class _Frame(Config):
    """The recipe's top level; the stage sections are checked one by one below."""

    name: str = Field(pattern=_NAME)
    seed: int = Field(ge=0)
    efforts: tuple[str, ...] = Field(min_length=1)
    domains: dict[str, DomainSection] = Field(min_length=1)
    corpus: dict[str, Any]
    midtrain: dict[str, Any]
    budget: dict[str, Any]
    expert: dict[str, Any]
    distill: dict[str, Any]
    evaluate: dict[str, Any]
    export: ExportConfig
    resources: ResourcesSection = ResourcesSection()
    functions: dict[str, DottedPath] = Field(default_factory=dict)


class Recipe(Config):
    """All of a run, resolved: defaults filled in, ``experts`` one complete table a cell ``domain/effort``."""

    name: str
    seed: int
    efforts: tuple[str, ...]
    domains: dict[str, DomainSection]
    corpus: dict[str, Any]
    midtrain: dict[str, Any]
    budget: dict[str, Any]
    experts: dict[str, dict[str, Any]]
    distill: dict[str, Any]
    evaluate: dict[str, Any]
    export: ExportConfig
    resources: ResourcesSection
    functions: dict[str, str]

    @property
    def cells(self) -> tuple[str, ...]:
        """Every ``domain/effort``, in the recipe's order."""
        return tuple(f"{domain}/{effort}" for domain in self.domains for effort in self.efforts)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, overrides (``expert.optimizer.lr=3e-4``), checks and resolves. Raises ValueError in one line."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"cannot read the recipe {path}: {error.strerror}; name a TOML file such as recipes/smoke.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        table = merge(table, parse_override(override))
    return resolve_recipe(table, str(path))


def parse_override(text: str) -> dict[str, Any]:
    """``a.b=value`` as a table. The value is TOML; a bare word is a string. Key parts may hold slashes unquoted."""
    key, equals, value = text.partition("=")
    parts = re.findall(r'"[^"]*"|[^.]+', key.strip())
    if not equals or not parts:
        raise ValueError(f"--set {text}: write it as KEY=VALUE, for example --set expert.optimizer.lr=3e-4")
    path = dotted([part.strip('" ') for part in parts])
    for candidate in (value, '"' + value.strip() + '"' if re.fullmatch(r"\s*[A-Za-z_][\w./:@-]*\s*", value) else "="):
        try:
            return tomllib.loads(f"{path} = {candidate}")
        except tomllib.TOMLDecodeError:
            continue
    raise ValueError(f"--set {text}: {value!r} is not a TOML value; quote a text: --set '{path}=\"…\"'")


def resolve_recipe(table: Mapping[str, Any], source: str) -> Recipe:
    """Checks a recipe's table as a whole. Raises ValueError in one line that names ``source`` and the key."""
    _check_finite(table, [], source)
    frame = validate(_Frame, table, [], source)
    _check_names(frame, source)
    sections = {
        name: validate(model, getattr(frame, name), [name], source).model_dump()
        for name, model in {
            "corpus": CorpusSection,
            "midtrain": MidtrainSection,
            "budget": BudgetSection,
            "distill": DistillSection,
            "evaluate": EvaluateSection,
        }.items()
    }
    cells = [f"{domain}/{effort}" for domain in frame.domains for effort in frame.efforts]
    kept = ("name", "seed", "efforts", "domains", "export", "resources")
    resolved: dict[str, Any] = {name: getattr(frame, name) for name in kept} | sections
    resolved["functions"] = {kind: frame.functions.get(kind, entry.function) for kind, entry in KINDS.items()}
    resolved["experts"] = _resolve_experts(frame.expert, cells, source)
    recipe = Recipe(**resolved)
    _check_sense(recipe, source)
    return recipe


def _resolve_experts(section: Mapping[str, Any], cells: Sequence[str], source: str) -> dict[str, dict[str, Any]]:
    """One complete table a cell: the section, then ``cells`` patterns, the general ones before the specific."""
    base = {key: value for key, value in section.items() if key != "cells"}
    validate(ExpertSection, base, ["expert"], source)
    patterns = section.get("cells", {})
    if not isinstance(patterns, Mapping):
        raise ValueError(f'{source}: expert.cells is a table of tables: write [expert.cells."*/low"]')
    for pattern, table in patterns.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{source}: {dotted(['expert', 'cells', pattern])} is not a table")
        if not any(_matches(pattern, cell) for cell in cells):
            hint = nearest(pattern, [*cells, *(f"*/{cell.split('/')[1]}" for cell in cells)])
            raise ValueError(f"{source}: {dotted(['expert', 'cells', pattern])} fits no cell; {hint}")
    resolved: dict[str, dict[str, Any]] = {}
    for cell in cells:
        merged: Mapping[str, Any] = base
        for pattern in sorted((p for p in patterns if _matches(p, cell)), key=lambda p: -p.split("/").count("*")):
            merged = merge(merged, patterns[pattern])
            validate(ExpertSection, merged, ["expert", "cells", pattern], source)
        resolved[cell] = validate(ExpertSection, merged, ["expert"], source).model_dump()
    return resolved


def _matches(pattern: str, cell: str) -> bool:
    parts = pattern.split("/")
    return len(parts) == 2 and all(part in ("*", own) for part, own in zip(parts, cell.split("/"), strict=True))


def _check_finite(table: Mapping[str, Any], where: Sequence[str], source: str) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping):
            _check_finite(value, [*where, key], source)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{source}: {dotted([*where, key])} = {value}: write a finite number")


def _check_names(frame: _Frame, source: str) -> None:
    for where, names in (("domains", list(frame.domains)), ("efforts", list(frame.efforts))):
        for name in names:
            if not re.fullmatch(_NAME, name):
                raise ValueError(f"{source}: {where}: {name!r} is no plain name; use small letters, digits, - and _")
        if len(set(names)) < len(names):
            raise ValueError(f"{source}: {where} = {names} names one twice; name each once")
    for kind in [*frame.functions, *frame.resources.threads]:
        if kind not in KINDS:
            table = "functions" if kind in frame.functions else "resources.threads"
            raise ValueError(f"{source}: unknown key {table}.{dotted([kind])}; {nearest(kind, list(KINDS))}")


def _check_sense(recipe: Recipe, source: str) -> None:
    """What no single section can know: that the sections fit each other."""
    for key in ("scale", "quantile"):
        values = recipe.budget[key]
        for effort in values:
            if effort not in recipe.efforts:
                raise ValueError(f"{source}: unknown key budget.{key}.{effort}; {nearest(effort, recipe.efforts)}")
        for effort in recipe.efforts:
            if effort not in values:
                raise ValueError(f"{source}: budget.{key}.{effort} is missing; every effort needs a budget")
            if key == "scale" and not values[effort] > 0:
                raise ValueError(
                    f"{source}: budget.{key}.{effort} = {values[effort]}: a budget of no tokens; use a number above 0"
                )
    if len(set(recipe.distill["cells"])) < len(recipe.distill["cells"]):
        raise ValueError(f"{source}: distill.cells names a cell twice; name each once")
    for cell in recipe.distill["cells"]:
        if cell not in recipe.cells:
            hint = nearest(cell, recipe.cells)
            raise ValueError(f"{source}: distill.cells: {cell} has no teacher (no such expert in this recipe); {hint}")
    for domain, section in recipe.domains.items():
        for key, needed, have, num in (
            ("evaluate.num_tasks", recipe.evaluate["num_tasks"], "num_test", section.num_test),
            ("evaluate.num_tasks_other", recipe.evaluate["num_tasks_other"], "num_test", section.num_test),
            ("budget.num_tasks", recipe.budget["num_tasks"], "num_train", section.num_train),
        ):
            if needed > num:
                raise ValueError(
                    f"{source}: {key} = {needed}, but domains.{domain}.{have} = {num}; raise that or lower this"
                )
    num_heads, num_kv_heads = (recipe.midtrain["model"][key] for key in ("num_heads", "num_kv_heads"))
    if num_heads % num_kv_heads:
        key = "midtrain.model.num_heads"
        raise ValueError(f"{source}: {key} = {num_heads} is no multiple of num_kv_heads = {num_kv_heads}")
