"""The stage store: ``store/<stage>/<fingerprint12>/<attempt>/`` with the record written last.

An attempt without a record is unfinished work: it is entered again and goes on from its checkpoints. An attempt whose
record does not match its files any more does not exist for anyone.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from flows.errors import StageFailedError
from flows.fingerprint import SHORT, hash_file
from flows.lock import Lease
from flows.specs import StageResult
from flows.workspace import write_json

RECORD = "record.json"
ATTEMPT = "attempt.json"


class Store:
    """Reads and writes the attempts of one workspace."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, stage: str, fingerprint: str, check: Literal["quick", "full"]) -> StageResult | None:
        """The newest intact result. ``quick`` re-hashes only files whose size or mtime moved, ``full`` every file."""
        for folder in reversed(self._attempts(stage, fingerprint)):
            result = read_record(folder)
            if result is not None and result.fingerprint == fingerprint and damage(result, check) is None:
                return result
        return None

    def find_damage(self, stage: str, fingerprint: str) -> str | None:
        """What is wrong with the newest recorded attempt, for the plan's reason."""
        for folder in reversed(self._attempts(stage, fingerprint)):
            if (result := read_record(folder)) is not None:
                return damage(result, "quick")
        return None

    def unfinished(self, stage: str, fingerprint: str, code: str) -> Path | None:
        """The newest attempt, if it has no record and was begun by the same code."""
        attempts = self._attempts(stage, fingerprint)
        if not attempts or (attempts[-1] / RECORD).exists():
            return None
        return attempts[-1] if read_attempt(attempts[-1]).get("code") == code else None

    def open_attempt(self, stage: str, fingerprint: str, code: str) -> Path:
        """The unfinished attempt to go on with, or a new folder."""
        folder = self.unfinished(stage, fingerprint, code)
        if folder is not None:
            shutil.rmtree(folder / "output", ignore_errors=True)
        else:
            attempts = self._attempts(stage, fingerprint)
            number = int(attempts[-1].name) + 1 if attempts else 1
            folder = self._folder(stage, fingerprint) / str(number)
            folder.mkdir(parents=True)
            write_json(folder / ATTEMPT, {"code": code, "started": time.time(), "spent_s": 0.0})
        (folder / "output").mkdir(exist_ok=True)
        return folder

    def commit(self, result: StageResult, lease: Lease) -> None:
        """Writes the record, unless another run holds the workspace by now; then drops what only a resume needs."""
        temporary = result.folder / (RECORD + ".new")
        with temporary.open("w") as file:
            file.write(json.dumps(result.to_json(), indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        lease.commit(temporary, result.folder / RECORD)
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)

    def results(self, stage: str) -> list[StageResult]:
        """Every recorded attempt of a stage, oldest first, unchecked."""
        found = [read_record(path.parent) for path in (self.root / stage).glob(f"*/*/{RECORD}")]
        return sorted((r for r in found if r is not None and r.stage == stage), key=lambda r: r.created)

    def all_results(self) -> Iterator[StageResult]:
        for path in self.root.rglob(RECORD):
            if (result := read_record(path.parent)) is not None:
                yield result

    def _folder(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint[:SHORT]

    def _attempts(self, stage: str, fingerprint: str) -> list[Path]:
        folder = self._folder(stage, fingerprint)
        if not folder.is_dir():
            return []
        return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def read_record(folder: Path) -> StageResult | None:
    """None when there is no record, or one that cannot be read."""
    try:
        return StageResult.from_json(json.loads((folder / RECORD).read_text()), folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_attempt(folder: Path) -> Mapping[str, float | str]:
    """Code digest, start and time spent so far of an attempt."""
    try:
        row: dict[str, float | str] = json.loads((folder / ATTEMPT).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return row


def add_spent(folder: Path, seconds: float) -> None:
    """Keeps the working time of an interrupted attempt; only a figure, so a full disk does not matter here."""
    with contextlib.suppress(OSError):
        row = dict(read_attempt(folder))
        write_json(folder / ATTEMPT, row | {"spent_s": float(row.get("spent_s", 0.0)) + seconds})


def damage(result: StageResult, check: Literal["quick", "full"]) -> str | None:
    """The first output file that is missing, added or changed; None when the result is intact."""
    present = set(_files(result.output_path)) if result.output_path.is_dir() else set()
    for path in sorted(set(result.manifest) ^ present):
        return f"output/{path} is missing" if path in result.manifest else f"output/{path} does not belong there"
    for path, sha256 in sorted(result.manifest.items()):
        status = (result.output_path / path).stat()
        same = (status.st_size, status.st_mtime_ns) == tuple(result.sizes[path])
        if (check == "full" or not same) and hash_file(result.output_path / path) != sha256:
            return f"output/{path} was changed"
    return None


def take_manifest(output: Path, stage: str) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Digests and sizes of all output files, after an fsync of each. Raises StageFailedError for links or no output."""
    manifest: dict[str, str] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for name in sorted(_files(output)):
        path = output / name
        if path.is_symlink():
            raise StageFailedError(f"stage {stage} left a link in its output ({name}); only plain files are kept")
        with path.open("rb") as file:
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        manifest[name] = hash_file(path)
        sizes[name] = (status.st_size, status.st_mtime_ns)
    if not manifest:
        raise StageFailedError(f"stage {stage} ended without writing anything to {output}")
    return manifest, sizes


def _files(output: Path) -> Iterator[str]:
    return (str(path.relative_to(output)) for path in output.rglob("*") if path.is_symlink() or not path.is_dir())
