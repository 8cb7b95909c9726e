"""Recipes: what is read, resolved and refused, and how the refusal reads."""

from pathlib import Path

import pytest

from flows.recipe import load_recipe, parse_override

REPOSITORY = Path(__file__).resolve().parents[2]


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_recipe(recipe, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_shipped_recipes_are_valid() -> None:
    paths = sorted((REPOSITORY / "recipes").glob("*.toml"))
    assert len([load_recipe(path) for path in paths]) == len(paths) > 0


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("seeed=1", "unknown key seeed; did you mean seed?"),
        ("expert.lr=1e-3", "unknown key expert.lr; did you mean expert.optimizer.lr?"),
        ("expert.optimizer.lrr=1e-3", "unknown key expert.optimizer.lrr; did you mean expert.optimizer.lr?"),
        ("expert.domain=coding", "unknown key expert.domain; expert has"),
        ("domains.coding.num_trian=3", "unknown key domains.coding.num_trian; did you mean domains.coding.num_train?"),
        ('expert.cells."coding/hig".num_steps=1', 'expert.cells."coding/hig" fits no cell; did you mean coding/high?'),
        (
            "expert.cells.*/low.lr=1",
            'unknown key expert.cells."*/low".lr; did you mean expert.cells."*/low".optimizer.lr?',
        ),
        ("functions.exprt=a:b", "unknown key functions.exprt; did you mean ex"),
        ("resources.threads.midtrian=1", "unknown key resources.threads.midtrian; did you mean midtrain?"),
        ("budget.scale.lo=1.0", "unknown key budget.scale.lo; did you mean low?"),
        ("budget.max_new_tokens=0", "budget.max_new_tokens = 0: input should be greater than 0"),
        ("budget.quantile.lo=0.5", "unknown key budget.quantile.lo; did you mean low?"),
        ("budget.scale.low=0", "budget.scale.low = 0.0: a budget of no tokens"),
        ('distill.cells=["coding/ultra"]', "coding/ultra has no teacher"),
        ("midtrain.num_steps=ten", "midtrain.num_steps = 'ten': input should be a valid integer"),
        ("midtrain.num_steps=true", "midtrain.num_steps = True: input should be a valid integer"),
        ("midtrain.optimizer.lr=nan", "midtrain.optimizer.lr = nan: write a finite number"),
        ("midtrain.optimizer.lr=inf", "midtrain.optimizer.lr = inf: write a finite number"),
        (
            "distill.divergence=half",
            "distill.divergence = 'half': input should be 'full_vocabulary', 'jensen_shannon' or 'sampled_token'",
        ),
        ('efforts=["low", "low"]', "names one twice"),
        ('efforts=["low", "high", "max"]', "budget.scale.max is missing"),
        ('efforts=["a b"]', "is no plain name"),
        ("evaluate.num_tasks=9", "evaluate.num_tasks = 9, but domains.coding.num_test = 8"),
        ("midtrain.model.num_kv_heads=3", "num_heads = 2 is no multiple of num_kv_heads = 3"),
    ],
)
def test_a_fault_is_named_with_its_key_and_a_remedy(recipe: Path, override: str, wanted: str) -> None:
    text = refusal(recipe, override)
    assert text.startswith(f"{recipe}: ")
    assert wanted in text


def test_a_missing_key_is_named(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("batch_size = 2\n", ""))
    assert "midtrain.batch_size is missing" in refusal(recipe)


def test_broken_toml_and_a_missing_file_are_one_line(recipe: Path, tmp_path: Path) -> None:
    assert "cannot read the recipe" in refusal(tmp_path / "none.toml")
    recipe.write_text("name = \n")
    assert "is not valid TOML" in refusal(recipe)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("a.b=3e-4", {"a": {"b": 3e-4}}),
        ("a.b = 3", {"a": {"b": 3}}),
        ("a=next_effort", {"a": "next_effort"}),
        ('a=["x", "y"]', {"a": ["x", "y"]}),
        ("a.coding/high.b=true", {"a": {"coding/high": {"b": True}}}),
        ('a."*/low".b="t"', {"a": {"*/low": {"b": "t"}}}),
        ("functions.report=my.module:build", {"functions": {"report": "my.module:build"}}),
    ],
)
def test_overrides_are_toml(text: str, table: dict[str, object]) -> None:
    assert parse_override(text) == table


@pytest.mark.parametrize("text", ["seed", "=3", "a=[1", "a="])
def test_a_broken_override_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        parse_override(text)


def test_the_specific_cell_overrides_the_general_one(recipe: Path) -> None:
    text = recipe.read_text() + (
        '[expert.cells."coding/high"]\nnum_steps = 9\n'
        '[expert.cells."*/high"]\nnum_steps = 5\noptimizer.lr = 0.5\n'
        '[expert.cells."*/*"]\nnum_steps = 4\n'
    )
    recipe.write_text(text)
    experts = load_recipe(recipe).experts
    assert {cell: table["num_steps"] for cell, table in experts.items()} == {
        "coding/low": 4,
        "coding/high": 9,
        "general/low": 4,
        "general/high": 5,
    }
    assert [experts["coding/high"]["optimizer"]["lr"], experts["coding/low"]["optimizer"]["lr"]] == [0.5, 1e-3]
    assert experts["coding/high"]["optimizer"]["max_grad_norm"] == 1.0
