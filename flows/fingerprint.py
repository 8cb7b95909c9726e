"""Identity by content: canonical JSON, fingerprints of what a stage will do, digests of what it produced."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHORT = 12
_BLOCK = 1 << 20


def canonical_json(value: Any) -> bytes:
    """One byte string for one value: sorted keys, no spaces, UTF-8.

    Raises TypeError for anything but None, bool, int, str, finite float, list, tuple and mappings with string keys:
    nothing gets an identity by its repr.
    """
    return json.dumps(
        _plain(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def stage_fingerprint(
    kind: str, function: str, version: int, config: Mapping[str, Any], inputs: Mapping[str, str]
) -> str:
    """Identity of a stage's work. ``inputs`` maps a role to the result id of what fills it."""
    return digest({"kind": kind, "function": function, "version": version, "config": config, "inputs": inputs})


def result_digest(fingerprint: str, manifest: Mapping[str, str]) -> str:
    """Identity of what was produced; ``manifest`` maps each output file to its SHA-256."""
    return digest({"fingerprint": fingerprint, "manifest": manifest})


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def derive_seed(seed: int, stage: str) -> int:
    """A stage's own seed, 63 bits: no two stages of a recipe share one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}".encode()).digest()[:8], "big") >> 1


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise TypeError(f"{where} = {value} has no identity: only finite numbers do")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}: only string keys have an identity")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which has no canonical JSON form")
