"""The recipe as a graph of stages: who does what, with which configuration, on whose results."""

from collections.abc import Mapping, Sequence
from typing import Any

from data.config import CorpusConfig, TaskSetConfig
from distill.config import DistillConfig
from engine.config import BudgetConfig, EvaluateConfig, MidtrainConfig
from experts.config import ExpertConfig
from flows.fingerprint import derive_seed
from flows.recipe import Recipe
from flows.specs import KINDS, Resources, StageSpec

Graph = Mapping[str, StageSpec]


def build_graph(recipe: Recipe) -> Graph:
    """Every stage by name, inputs before those that need them; configurations complete, seeds and cells filled in."""
    graph: dict[str, StageSpec] = {}

    def add(name: str, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
        graph[name] = _spec(recipe, name, config, inputs)
        return name

    tasks: dict[str, str] = {}
    for domain in recipe.domains:
        name = f"tasks/{domain}"
        tasks[name] = add(name, _task_set(recipe, domain), {})
    corpus = add("corpus", _corpus(recipe), {})
    base = add("midtrain", _seeded(MidtrainConfig, recipe, "midtrain", recipe.midtrain), {"corpus": corpus})
    budget = add("budget", _budget(recipe), {"model": base, **tasks})

    experts: dict[str, str] = {}
    for cell in sorted(recipe.cells, key=lambda c: -recipe.efforts.index(c.split("/")[1])):
        domain = cell.split("/")[0]
        start = _start(recipe, cell, base, experts)
        inputs = {"start": start, "budget": budget, "tasks": tasks[f"tasks/{domain}"]}
        experts[cell] = add(f"expert/{cell}", _expert(recipe, cell), inputs)

    cells = recipe.distill["cells"] or recipe.cells
    teachers = route_teachers(cells, experts)
    student = add("distill", _distill(recipe, cells), {"start": base, "budget": budget, **tasks, **teachers})

    scored: dict[str, str] = {}
    for row, model in {"base": base, **experts, "student": student}.items():
        name = f"evaluate/{row}"
        inputs = {"model": model, "budget": budget, **tasks}
        scored[row] = add(name, _evaluate(recipe, name, own=(row,) if row in experts else recipe.cells), inputs)

    add("export", recipe.export.model_dump(), {"model": student, "evaluation": scored["student"]})
    matrix = {"base": scored["base"], "student": scored["student"]}
    matrix |= {f"expert/{cell}": scored[cell] for cell in experts}
    rollouts = {f"rollouts/{cell}": expert for cell, expert in experts.items()}
    made_from = {**tasks, "corpus": corpus, "midtrain": base, "budget": budget, "distill": student}
    add("report", {"recipe": recipe.name, "seed": recipe.seed}, {**matrix, **rollouts, **made_from})
    return graph


def route_teachers(cells: Sequence[str], experts: Mapping[str, str]) -> dict[str, str]:
    """The one teacher of each cell, by role. Raises ValueError for a cell without one: there is no default teacher."""
    for cell in cells:
        if cell not in experts:
            raise ValueError(f"distill.cells: {cell} has no teacher; the experts are {', '.join(experts)}")
    return {f"teacher/{cell}": experts[cell] for cell in cells}


def descendants(graph: Graph, name: str) -> set[str]:
    """``name`` and every stage that needs it, directly or not."""
    found = {name}
    for stage, spec in graph.items():
        if found & set(spec.inputs.values()):
            found.add(stage)
    return found


def find_stage(graph: Graph, name: str) -> str:
    """A stage by its name or a unique ending of it; ``coding/high`` is the expert. Raises ValueError."""
    for candidate in (name, f"expert/{name}"):
        if candidate in graph:
            return candidate
    endings = [stage for stage in graph if stage.endswith(f"/{name}")]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise ValueError(f"{name} could be {' or '.join(endings)}; write more of it")
    raise ValueError(f"no stage is called {name}; the stages are {', '.join(graph)}")


def _spec(recipe: Recipe, name: str, config: Mapping[str, Any], inputs: Mapping[str, str]) -> StageSpec:
    kind = name.split("/")[0]
    num_threads = min(recipe.resources.threads.get(kind, 1), recipe.resources.num_slots)
    function, version = recipe.functions[kind], KINDS[kind].version
    return StageSpec(name, kind, config, inputs, function, version, Resources(num_threads))


def _seeded(model: type[Any], recipe: Recipe, stage: str, section: Mapping[str, Any], **filled: Any) -> dict[str, Any]:
    made: dict[str, Any] = model(**section, seed=derive_seed(recipe.seed, stage), **filled).model_dump(mode="json")
    return made


def _task_set(recipe: Recipe, domain: str) -> dict[str, Any]:
    section = recipe.domains[domain].model_dump(include={"generator", "num_train", "num_test"})
    return _seeded(TaskSetConfig, recipe, f"tasks/{domain}", section, domain=domain)


def _corpus(recipe: Recipe) -> dict[str, Any]:
    paths = {d: section.model_dump(exclude={"num_train", "num_test"}) for d, section in recipe.domains.items()}
    return _seeded(CorpusConfig, recipe, "corpus", recipe.corpus, domains=paths, efforts=recipe.efforts)


def _budget(recipe: Recipe) -> dict[str, Any]:
    return _seeded(BudgetConfig, recipe, "budget", recipe.budget, efforts=recipe.efforts)


def _start(recipe: Recipe, cell: str, base: str, experts: Mapping[str, str]) -> str:
    """The base, or the expert of the next larger effort; the largest effort always starts from the base."""
    domain, effort = cell.split("/")
    larger = recipe.efforts[recipe.efforts.index(effort) + 1 :]
    if recipe.experts[cell]["start"] == "base" or not larger:
        return base
    return experts[f"{domain}/{larger[0]}"]


def _expert(recipe: Recipe, cell: str) -> dict[str, Any]:
    domain, effort = cell.split("/")
    section = {key: value for key, value in recipe.experts[cell].items() if key != "start"}
    return _seeded(ExpertConfig, recipe, f"expert/{cell}", section, domain=domain, effort=effort)


def _distill(recipe: Recipe, cells: Sequence[str]) -> dict[str, Any]:
    section = {key: value for key, value in recipe.distill.items() if key != "cells"}
    return _seeded(DistillConfig, recipe, "distill", section, cells=tuple(cells))


def _evaluate(recipe: Recipe, stage: str, own: Sequence[str]) -> dict[str, Any]:
    others = tuple(cell for cell in recipe.cells if cell not in own)
    return _seeded(EvaluateConfig, recipe, stage, recipe.evaluate, cells=tuple(own), other_cells=others)
