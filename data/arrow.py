"""Rows to Hugging Face ``datasets`` folders and back: Arrow files with a digest, the same bytes for the same rows."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa


def save_rows(rows: Iterable[dict[str, Any]], folder: Path) -> str:
    """Write ``rows`` (at least one, all with the same columns) so that ``datasets.load_from_disk(folder)`` reads them.

    Returns the SHA-256 of the Arrow content, which is also the data set's fingerprint. Files are synced to disk.
    Raises ValueError when there is no row or a row's columns differ, naming both lists.
    """
    from datasets import Dataset, disable_progress_bars

    listed = list(rows)
    if not listed:
        raise ValueError(f"no rows to write to {folder}")
    expected = list(listed[0])
    for index, row in enumerate(listed):
        if list(row) != expected:
            raise ValueError(f"row {index} for {folder} has columns {list(row)}, the first row {expected}")
    table = pa.Table.from_pylist(listed)
    digest = _digest(table)
    disable_progress_bars()
    Dataset(table, fingerprint=digest[:16]).save_to_disk(str(folder), num_proc=None)
    for path in (*folder.iterdir(), folder):
        _sync(path)
    return digest


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of such a folder, through pyarrow alone (importing ``datasets`` costs a second a process).

    Raises ValueError when the folder holds no data set.
    """
    files = sorted(folder.glob("data-*.arrow"))
    if not files:
        raise ValueError(f"{folder} holds no data set; name a folder written by datasets.save_to_disk")
    rows: list[dict[str, Any]] = []
    for file in files:
        with pa.memory_map(str(file)) as source:
            rows += pa.ipc.open_stream(source).read_all().to_pylist()
    return rows


def _digest(table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
