"""A workspace: the folder that holds the stage store, the two databases and the lock. ``nonet.json`` marks it."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.errors import DiskFullError

MARKER = "nonet.json"
LAYOUT = 1
MIN_FREE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths only; an absolute root."""

    root: Path

    @property
    def store_path(self) -> Path:
        return self.root / "store"

    @property
    def prefect_path(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow_uri(self) -> str:
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def artifacts_path(self) -> Path:
        return self.root / "mlartifacts"

    @property
    def last_path(self) -> Path:
        """The last run: its recipe, overrides and state."""
        return self.root / "last.json"

    def read_last(self) -> dict[str, Any] | None:
        try:
            row: dict[str, Any] = json.loads(self.last_path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return row

    def write_last(self, row: dict[str, Any]) -> None:
        write_json(self.last_path, row)


def open_workspace(path: Path, *, create: bool) -> Workspace:
    """An existing workspace, or with ``create`` a new one in a folder that is missing or empty.

    Raises ValueError when ``path`` is something else, DiskFullError when there is no room left to work in.
    """
    root = path.absolute()
    marker = root / MARKER
    if not marker.is_file():
        if root.exists() and not _is_free(root):
            raise ValueError(
                f"{path} is not a workspace (no {MARKER} in it); name a new or empty folder: --workspace DIR"
            )
        if not create:
            raise ValueError(
                f"there is no workspace at {path}; `nonet run RECIPE` makes one, --workspace DIR names another"
            )
        root.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"nonet": LAYOUT, "created": time.time()})
    try:
        layout = json.loads(marker.read_text()).get("nonet")
    except (json.JSONDecodeError, AttributeError):
        layout = None
    if layout != LAYOUT:
        raise ValueError(
            f"{marker} does not mark a workspace of layout {LAYOUT} (it says {layout!r}); use another --workspace"
        )
    if create and shutil.disk_usage(root).free < MIN_FREE_BYTES:
        raise DiskFullError(f"less than {MIN_FREE_BYTES >> 20} MB are free under {root}; free some space and run again")
    return Workspace(root)


def peek_workspace(path: Path) -> Workspace:
    """For looking only: a folder that does not exist yet or is empty counts as an empty workspace."""
    root = path.absolute()
    if not root.exists() or (not (root / MARKER).exists() and _is_free(root)):
        return Workspace(root)
    return open_workspace(path, create=False)


def _is_free(root: Path) -> bool:
    """Empty, or another run is just about to write the marker."""
    return root.is_dir() and all(path.name.startswith(MARKER) for path in root.iterdir())


def write_json(path: Path, row: dict[str, Any]) -> None:
    """Atomic and durable: a new file, fsynced, renamed into place."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(json.dumps(row, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
