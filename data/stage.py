"""What a worker is told and what it leaves behind: the contract between the control plane and every stage function.

A stage function has the form ``run(request: StageRequest) -> dict[str, float]``: it reads ``request.inputs``, writes
its result under ``request.output_path`` and returns summary metrics. It may keep checkpoints under
``request.checkpoint_path``; when it starts again in the same folder it goes on from the last good one, bit for bit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StageRequest:
    """Everything a stage function may depend on. ``inputs`` maps a role to the output folder of another stage."""

    stage: str
    kind: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Path]
    folder: Path
    num_threads: int = 1

    @property
    def output_path(self) -> Path:
        """Hashed into the manifest: must be a deterministic function of config and inputs."""
        return self.folder / "output"

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line, ``{"step": int, "time_s": float, name: float, ...}``; outside the manifest."""
        return self.folder / "metrics.jsonl"

    def input(self, role: str) -> Path:
        """The output folder that fills ``role``. Raises ValueError naming the roles that exist."""
        if role not in self.inputs:
            raise ValueError(f"stage {self.stage} has no input {role!r}; it has {sorted(self.inputs)}")
        return self.inputs[role]

    def save(self, path: Path) -> None:
        row = asdict(self) | {"inputs": {k: str(v) for k, v in self.inputs.items()}, "folder": str(self.folder)}
        path.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")

    @staticmethod
    def load(path: Path) -> "StageRequest":
        row = json.loads(path.read_text())
        row["inputs"] = {role: Path(folder) for role, folder in row["inputs"].items()}
        row["folder"] = Path(row["folder"])
        return StageRequest(**row)
