"""One recipe from start to finish: report and student, nothing twice, a rerun of what is asked, kills without trace."""

import json
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
pytestmark = pytest.mark.timeout(900)
CELLS = {f"{d}/{e}" for d in ("coding", "research", "general") for e in ("low", "high", "max")}
STAGES = {
    *("tasks/coding", "tasks/research", "tasks/general", "corpus", "midtrain", "budget", "distill", "export", "report"),
    *(f"expert/{cell}" for cell in CELLS),
    *(f"evaluate/{row}" for row in ("base", "student", *CELLS)),
}
DESCENDANTS = {"expert/coding/high", "evaluate/coding/high", "distill", "evaluate/student", "export", "report"}

RecordsOf = Callable[[Path], dict[str, dict[str, Any]]]


def result_ids(records: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """Every stage's results but the report's, which tells the time."""
    ids: dict[str, set[str]] = {}
    for record in records.values():
        if record["stage"] != "report":
            ids.setdefault(record["stage"], set()).add(record["result_id"])
    return ids


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_makes_a_plan(nonet: Any, tmp_path: Path, path: Path) -> None:
    plan = nonet("plan", str(path), "-w", str(tmp_path / "none"), "--json")
    assert (plan.returncode, plan.stderr) == (1, "")
    rows = {row["stage"]: row["status"] for row in json.loads(plan.stdout)}
    assert {"corpus", "midtrain", "budget", "distill", "evaluate/base", "evaluate/student", "export"} < rows.keys()
    assert {name for name, status in rows.items() if status == "run"} == {
        name for name in rows if name == "corpus" or name.startswith("tasks/")
    }
    assert set(rows.values()) == {"run", "waits"}
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_every_stage_left_one_record_and_the_report_reads_them(reference: Path, records_of: RecordsOf) -> None:
    records = records_of(reference)
    assert sorted(record["stage"] for record in records.values()) == sorted(STAGES)
    (report,) = (reference / "store" / "report").rglob("report.html")
    html = report.read_text()
    assert all(cell in html for cell in CELLS)
    assert "<script src" not in html
    assert "http-equiv" not in html
    figures = json.loads(report.with_suffix(".json").read_text())
    assert set(figures["cells"]) == CELLS


@pytest.mark.slow
def test_the_student_speaks_through_plain_transformers(reference: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (config,) = (reference / "store" / "export").rglob("config.json")
    model, tokenizer = (c.from_pretrained(config.parent) for c in (AutoModelForCausalLM, AutoTokenizer))
    messages = [{"role": "system", "content": "general"}, {"role": "user", "content": "7+5*3"}]
    inputs = tokenizer.apply_chat_template(
        messages, effort="low", add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = tokenizer.decode(model.generate(**inputs, max_new_tokens=16, do_sample=False)[0])
    assert said.startswith("<|system|>low general<|user|>7+5*3<|assistant|><|think|>")
    (distilled,) = (reference / "store" / "distill").rglob("output/model.safetensors")
    assert (config.parent / "model.safetensors").read_bytes() == distilled.read_bytes()
    (base,) = (reference / "store" / "midtrain").rglob("output/model.safetensors")
    assert base.read_bytes() != distilled.read_bytes()


@pytest.mark.slow
def test_prefect_and_mlflow_have_seen_every_stage(reference: Path) -> None:
    with sqlite3.connect(reference / "prefect" / "prefect.db") as connection:
        flows = connection.execute("select state_name from flow_run").fetchall()
        tasks = connection.execute("select name, state_name from task_run").fetchall()
    assert flows == [("Completed",)]
    assert sorted(tasks) == sorted((stage, "Completed") for stage in STAGES)
    with sqlite3.connect(reference / "mlflow.db") as connection:
        statuses = connection.execute("select status, count(*) from runs group by status").fetchall()
        steps = connection.execute("select count(distinct step) from metrics where key = 'teacher_kl'").fetchone()
        versions = connection.execute("select count(*) from model_versions").fetchone()
    assert statuses == [("FINISHED", 1 + len(STAGES))]
    assert steps[0] >= 10
    assert versions[0] >= 1


@pytest.mark.slow
def test_a_second_run_runs_nothing(nonet: Any, reference: Path, records_of: RecordsOf) -> None:
    before = records_of(reference)
    again = nonet.run(reference, "--json")
    assert (again.returncode, again.stderr) == (0, "")
    answer = json.loads(again.stdout)
    assert answer["ran"] == []
    assert {row["cell"] for row in answer["matrix"]} == CELLS
    assert records_of(reference) == before
    assert nonet("plan", nonet.recipe, *nonet.overrides, "-w", str(reference)).returncode == 0


@pytest.mark.slow
def test_a_rerun_of_one_expert_runs_it_and_what_descends_from_it(
    nonet: Any, reference: Path, records_of: RecordsOf, tmp_path: Path
) -> None:
    workspace = Path(shutil.copytree(reference, tmp_path / "workspace"))
    before = records_of(workspace)
    rerun = nonet("rerun", "coding/high", "-w", str(workspace), "--json")
    assert (rerun.returncode, rerun.stderr) == (0, "")
    assert sorted(json.loads(rerun.stdout)["ran"]) == sorted(DESCENDANTS)
    after = records_of(workspace)
    assert {name: after[name] for name in before} == before
    assert sorted(after[name]["stage"] for name in after.keys() - before.keys()) == sorted(DESCENDANTS)
    assert result_ids(after) == result_ids(before)  # the same work gives the same bits


class Killer:
    """Kills each named stage's worker once: so many seconds after its step log has so many lines."""

    def __init__(self, workspace: Path, targets: dict[str, tuple[int, float]]) -> None:
        self.killed: set[str] = set()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._wait, args=(workspace / "store" / stage, stage, *when))
            for stage, when in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def _wait(self, folder: Path, stage: str, lines: int, delay_s: float) -> None:
        while not self._ended.wait(0.003):
            for log in folder.glob("*/*/metrics.jsonl"):
                if log.read_bytes().count(b"\n") >= lines:
                    time.sleep(delay_s)
                    if not (log.parent / "record.json").exists():
                        os.kill(int((log.parent / "worker.lock").read_text().split()[0]), signal.SIGKILL)
                        self.killed.add(stage)
                    return

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def run_killed(nonet: Any, workspace: Path, targets: dict[str, tuple[int, float]]) -> None:
    """A run in which these workers, one at least, are killed: one line, exit code 4, nothing of theirs is recorded."""
    process, killer = nonet.start(workspace), Killer(workspace, targets)
    _, errors = process.communicate(timeout=600)
    killer.close()
    assert killer.killed, errors
    assert process.returncode == 4, errors
    assert "was killed (SIGKILL" in errors
    assert len(errors.splitlines()) == 1
    for stage in killer.killed:
        assert not list((workspace / "store" / stage).rglob("record.json"))


@pytest.mark.slow
def test_workers_killed_at_several_instants_change_no_result(
    nonet: Any, reference: Path, records_of: RecordsOf, tmp_path: Path
) -> None:
    workspace, rng = tmp_path / "workspace", random.Random(0)

    def instant(first: int, last: int) -> tuple[int, float]:
        return rng.randint(first, last), rng.uniform(0.0, 0.03)

    run_killed(nonet, workspace, {"midtrain": instant(3, 30)})
    run_killed(nonet, workspace, {"expert/coding/max": instant(1, 4), "expert/research/high": instant(1, 4)})
    run_killed(nonet, workspace, {"distill": instant(2, 5)})
    assert nonet.run(workspace).returncode == 0
    records = records_of(workspace)
    assert result_ids(records) == result_ids(records_of(reference))
    assert {name.rpartition("/")[2] for name in records} == {"1"}  # every stage went on in its first attempt
    for stage in ("midtrain", "expert/coding/max", "expert/research/high", "distill"):
        (log,) = (workspace / "store" / stage).rglob("metrics.jsonl")
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))
