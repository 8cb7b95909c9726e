"""The rules of the house that a reader relies on: sizes, first lines, directions of import, no torch where unneeded."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("data", "engine", "experts", "distill", "flows", "bench", "tests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_says_first_what_it_does(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert not text or (ast.get_docstring(ast.parse(text)) or "").strip()


def test_imports_go_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename=".importlinter", no_cache=True) == 0


def test_the_command_line_loads_neither_torch_nor_a_service() -> None:
    heavy = ["torch", "transformers", "tokenizers", "datasets", "pyarrow", "prefect", "mlflow", "sqlalchemy", "jinja2"]
    code = f"import sys, flows.cli; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_flow_does_not_load_torch() -> None:
    code = "import sys, flows.pipeline, flows.mlflow_run; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_every_package_is_named_in_the_build() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for package in PACKAGES[:5]
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert found == set(named)
