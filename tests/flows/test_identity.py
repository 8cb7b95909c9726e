"""Canonical JSON, fingerprints and the graph: what is part of a stage's identity and what is not."""

from pathlib import Path

import pytest

from flows.fingerprint import canonical_json, derive_seed, digest, result_digest
from flows.graph import build_graph, descendants, find_stage, route_teachers
from flows.recipe import load_recipe
from flows.specs import StageSpec


def test_canonical_json_is_one_text_for_one_value() -> None:
    assert canonical_json({"b": (1, 2.0), "a": [None, True, "ü"]}) == '{"a":[null,true,"ü"],"b":[1,2.0]}'.encode()
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {3}}, [Path("x")], b"x", object()])
def test_canonical_json_refuses_what_has_no_identity(value: object) -> None:
    with pytest.raises(TypeError, match=r"\$"):
        canonical_json({"value": value})


def test_a_result_is_known_by_work_and_bytes() -> None:
    same = result_digest("f", {"a": "1", "b": "2"})
    assert same == result_digest("f", {"b": "2", "a": "1"})
    assert len({same, result_digest("g", {"a": "1", "b": "2"}), result_digest("f", {"a": "1", "b": "3"})}) == 3


def spec(**changes: object) -> StageSpec:
    base = {"name": "s", "kind": "k", "config": {"lr": 1.0}, "inputs": {"a": "t"}, "function": "m:f", "version": 1}
    return StageSpec(**(base | changes))  # type: ignore[arg-type]


def test_everything_but_name_and_resources_is_identity() -> None:
    changed = [{"kind": "l"}, {"config": {"lr": 2.0}}, {"function": "m:g"}, {"version": 2}]
    prints = {spec(**change).fingerprint({"a": "1"}) for change in changed} | {spec().fingerprint({"a": "2"})}
    assert len(prints | {spec().fingerprint({"a": "1"})}) == 6
    from flows.specs import Resources

    assert spec(resources=Resources(8)).fingerprint({"a": "1"}) == spec().fingerprint({"a": "1"})


def test_stages_have_their_own_seeds(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe))
    seeds = [s.config["seed"] for name, s in graph.items() if "seed" in s.config and name != "report"]
    assert len(set(seeds)) == len(seeds) == 16
    assert derive_seed(0, "corpus") == derive_seed(0, "corpus") != derive_seed(1, "corpus")
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_expert_starts_from_the_base_or_the_next_larger_effort(recipe: Path) -> None:
    base = build_graph(load_recipe(recipe))
    chained = build_graph(load_recipe(recipe, ["expert.start=next_effort"]))
    assert base["expert/coding/low"].inputs["start"] == "midtrain"
    assert chained["expert/coding/low"].inputs["start"] == "expert/coding/high"
    assert chained["expert/coding/high"].inputs["start"] == "midtrain"


def test_each_cell_has_its_one_teacher_and_no_default(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe))
    teachers = {role: stage for role, stage in graph["distill"].inputs.items() if role.startswith("teacher/")}
    assert teachers == {f"teacher/{c}": f"expert/{c}" for c in graph["distill"].config["cells"]}
    assert len(teachers) == 4
    with pytest.raises(ValueError, match=r"coding/max has no teacher; the experts are coding/low"):
        route_teachers(["coding/low", "coding/max"], {"coding/low": "expert/coding/low"})


def test_descendants_of_an_expert(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe))
    assert descendants(graph, "expert/coding/high") == {
        "expert/coding/high",
        "evaluate/coding/high",
        "distill",
        "evaluate/student",
        "export",
        "report",
    }
    chained = build_graph(load_recipe(recipe, ["expert.start=next_effort"]))
    assert {"expert/coding/low", "evaluate/coding/low"} <= descendants(chained, "expert/coding/high")


def test_a_stage_is_found_by_a_unique_ending(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe))
    assert find_stage(graph, "coding/high") == "expert/coding/high"
    assert find_stage(graph, "evaluate/coding/high") == "evaluate/coding/high"
    assert find_stage(graph, "student") == "evaluate/student"
    with pytest.raises(ValueError, match="no stage is called coding/max; the stages are"):
        find_stage(graph, "coding/max")
    assert find_stage(graph, "coding") == "tasks/coding"
    with pytest.raises(ValueError, match="high could be expert/coding/high or expert/general/high or evaluate"):
        find_stage(graph, "high")
