"""The metrics log of a stage (one JSON line a step) and the seeds of its random generators."""

import hashlib
import json
import math
import os
import time
from pathlib import Path


class MetricsLog:
    """Appends one JSON object a step to ``path``; the file is the truth, every other tracker a copy.

    ``time_s`` is Unix time. Parents are made on demand. Raises ValueError for a metric that is not finite.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, **metrics: float) -> None:
        """Appends and flushes one line; metric names may hold slashes (``accuracy/coding/high``)."""
        odd = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if odd:
            raise ValueError(f"step {step}: metrics {odd} are not finite")
        row = {"step": step, "time_s": time.time()} | {name: float(value) for name, value in metrics.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drops every line of a later step, and a line cut off by a kill: after a resume each step appears once."""
        if not self._path.exists():
            return
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def rows(self) -> list[dict[str, float]]:
        """Every complete line, oldest first; a line cut off by a kill is left out."""
        lines = self._path.read_text().split("\n") if self._path.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def mean_of_last(self, num_steps: int, *names: str) -> dict[str, float]:
        """Mean of each named metric over the last ``num_steps`` lines. Raises KeyError for a name that a line lacks."""
        rows = self.rows()[-num_steps:]
        return {name: sum(row[name] for row in rows) / len(rows) for name in names} if rows else {}


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order: ``seed_for(seed, "sample", step)``."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
