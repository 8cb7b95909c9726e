"""Data set folders: the same bytes for the same rows in any process, read alike by us and by ``datasets``."""

import hashlib
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from data.arrow import load_rows, save_rows

ROWS = [
    {"id": "a", "token_ids": [1, 2, 3], "loss_mask": [False, True, True], "messages": [{"role": "user", "text": "é"}]},
    {"id": "b", "token_ids": [4], "loss_mask": [False], "messages": [{"role": "user", "text": ""}]},
]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_round_trip_and_load_from_disk_agree(tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "set")
    assert load_rows(tmp_path / "set") == ROWS
    assert datasets.load_from_disk(str(tmp_path / "set")).to_list() == ROWS


def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    digest = save_rows(ROWS, tmp_path / "one")
    folder = str(tmp_path / "two")
    code = f"import pathlib, data.arrow; print(data.arrow.save_rows({ROWS!r}, pathlib.Path({folder!r})))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == digest
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert save_rows(ROWS[:1], tmp_path / "three") != digest


def test_missing_column_names_expected_and_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1 .* has columns \['id'\], the first row \['id', 'x'\]"):
        save_rows([{"id": "a", "x": 1}, {"id": "b"}], tmp_path / "set")


def test_nothing_to_write_or_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        save_rows([], tmp_path / "set")
    with pytest.raises(ValueError, match="holds no data set"):
        load_rows(tmp_path)
