"""Checkpoints of a stage: written whole or not at all, verified before use, the last two kept.

``<root>/step-00000040/`` holds what the trainer saved, ``cursor.json`` and, written last, ``manifest.json`` with the
SHA-256 of every other file. The folder is filled under a temporary name, synced, and renamed into place.
"""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from engine.trainer import Trainer

KEPT = 2
_PREFIX = "step-"
_UNFINISHED = "unfinished-"


def save_checkpoint(root: Path, step: int, trainer: Trainer, cursor: dict[str, Any]) -> Path:
    """Saves the trainer and the loop's ``cursor`` (JSON-serialisable) as of ``step``; returns the checkpoint's folder.

    Older checkpoints than the last two are removed once the new one is safe on disk.
    """
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / f"{_UNFINISHED}{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    trainer.save(unfinished)
    (unfinished / "cursor.json").write_text(json.dumps(cursor) + "\n")
    manifest = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (*unfinished.iterdir(), unfinished):
        _sync(path)
    folder = root / f"{_PREFIX}{step:08d}"
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _sync(root)
    for old in _newest_first(root)[KEPT:]:
        shutil.rmtree(old)
    return folder


def load_latest(root: Path, trainer: Trainer) -> dict[str, Any] | None:
    """Loads the newest undamaged checkpoint into ``trainer`` and returns its cursor; None when there is none at all.

    A damaged one is skipped with a warning that names it and the damage. Raises ValueError when all are damaged.
    """
    folders = _newest_first(root)
    for folder in folders:
        damage = _damage(folder)
        if damage is None:
            trainer.load(folder)
            cursor: dict[str, Any] = json.loads((folder / "cursor.json").read_text())
            return cursor
        warnings.warn(f"checkpoint {folder} is damaged ({damage}): falling back to the one before", stacklevel=2)
    if folders:
        raise ValueError(f"every checkpoint under {root} is damaged: remove the folder to start this stage again")
    return None


def _newest_first(root: Path) -> list[Path]:
    return sorted(root.glob(f"{_PREFIX}*"), reverse=True)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest: dict[str, str] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json is unreadable: {error}"
    for name, digest in manifest.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != digest:
            return f"{name} differs from its digest"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
