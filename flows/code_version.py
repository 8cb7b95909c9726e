"""Which code made a result: the git commit, and a digest of the stages' sources that also sees uncommitted changes."""

import subprocess
from pathlib import Path

from flows.fingerprint import digest, hash_file

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("data", "engine", "experts", "distill", "flows/report")


def source_digest() -> str:
    """SHA-256 over the sources of everything that a stage function is made of; 12 hex digits."""
    files = [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]
    return digest({str(path.relative_to(_ROOT)): hash_file(path) for path in files})[:12]


def git_commit() -> str:
    """HEAD of the checkout that holds this file; empty when there is none."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
