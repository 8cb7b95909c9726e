"""The metrics log survives kills and resumes; seeds differ wherever their parts do."""

from pathlib import Path

import pytest

from engine.metrics import MetricsLog, seed_for


def test_each_step_appears_once_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "stage" / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write(step, loss=1.0 / step, **{"accuracy/coding/high": 0.5})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    resumed = MetricsLog(path)
    resumed.truncate_after(2)
    resumed.write(3, loss=7.0)
    assert [row["step"] for row in resumed.rows()] == [1, 2, 3]
    assert resumed.rows()[-1]["loss"] == 7.0
    assert resumed.rows()[0]["accuracy/coding/high"] == 0.5
    assert list(path.parent.iterdir()) == [path]


def test_truncating_a_log_that_does_not_exist_does_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.truncate_after(0)
    assert log.rows() == []
    assert log.mean_of_last(5, "loss") == {}


def test_mean_of_the_last_lines(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.write(step, reward=float(step), tokens=2.0)
    assert log.mean_of_last(2, "reward", "tokens") == {"reward": 4.5, "tokens": 2.0}
    with pytest.raises(KeyError):
        log.mean_of_last(2, "missing")


def test_a_metric_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"step 3.*kl"):
        log.write(3, loss=1.0, kl=float("nan"))
    assert log.rows() == []


def test_seeds_depend_on_every_part_and_their_order() -> None:
    parts = [(0,), (1,), (0, "a"), (0, "b"), ("a", 0), (0, "a", 1), (0, "a1"), ("0", "a")]
    seeds = [seed_for(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_for(*p) for p in parts]
    assert seed_for(0) == 7520536977032167579
