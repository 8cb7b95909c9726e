"""Mid-training: every row once an epoch, and an interrupted run that ends as if nothing had happened."""

import json
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.arrow import load_rows
from data.stage import StageRequest
from engine.supervised import batches_of, load_documents, midtrain
from engine.weights import load_model

STEPS = 9
CONFIG = {
    "model": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 128,
    },
    "optimizer": {"name": "muon", "lr": 2e-2, "adam_lr": 2e-2, "warmup_steps": 2, "decay": "linear"},
    "seed": 4,
    "num_steps": STEPS,
    "batch_size": 16,
    "checkpoint_every": 2,
    "tokens_per_micro_batch": 512,
}


@pytest.fixture(scope="module")
def uninterrupted(new_request: Any, corpus_path: Path) -> StageRequest:
    request = new_request("midtrain", CONFIG, {"corpus": corpus_path})
    midtrain(request)
    return request


def take(batches: Iterator[list[int]], num: int) -> list[list[int]]:
    return list(islice(batches, num))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 30))
def test_every_row_once_an_epoch_and_a_start_goes_on_as_if_from_the_beginning(
    num_rows: int, batch_size: int, seed: int, start: int
) -> None:
    batches = take(batches_of(num_rows, batch_size, seed), start + 8)
    assert {len(batch) for batch in batches} == {batch_size}
    rows = [row for batch in batches for row in batch]
    for first in range(0, len(rows) - num_rows + 1, num_rows):
        assert sorted(rows[first : first + num_rows]) == list(range(num_rows))
    assert take(batches_of(num_rows, batch_size, seed, start), 8) == batches[start:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = take(batches_of(100, 100, seed=0), 2)
    assert first != second
    assert first != list(range(100))
    assert take(batches_of(100, 100, seed=1), 1) != [first]


def test_only_the_assistants_own_tokens_are_trained(corpus_path: Path) -> None:
    samples, rows = load_documents(corpus_path / "documents"), load_rows(corpus_path / "documents")
    assert [s.loss_mask_T for s in samples] == [tuple(row["loss_mask"]) for row in rows]
    assert [s.token_ids_T for s in samples] == [tuple(row["token_ids"]) for row in rows]
    assert {(s.domain, s.effort) for s in samples} == {(r["domain"], r["effort"]) for r in rows}
    assert all(not s.loss_mask_T[0] and s.loss_mask_T[-1] for s in samples)


def test_it_learns_and_logs_every_step_once(uninterrupted: StageRequest, corpus_path: Path) -> None:
    rows = [json.loads(line) for line in uninterrupted.metrics_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    documents = load_documents(corpus_path / "documents")
    drawn = take(batches_of(len(documents), 16, CONFIG["seed"]), STEPS)
    assert [row["num_tokens"] for row in rows] == [sum(sum(documents[i].loss_mask_T) for i in b) for b in drawn]
    assert sum(p.numel() for p in load_model(uninterrupted.output_path).parameters()) > 0


@pytest.mark.parametrize(("step", "after"), [(1, True), (3, False), (4, True), (5, True), (9, False), (9, True)])
def test_a_cut_run_ends_like_an_uninterrupted_one(
    new_request: Any,
    corpus_path: Path,
    uninterrupted: StageRequest,
    same_work: Any,
    cut: Any,
    step: int,
    after: bool,
) -> None:
    request = new_request("midtrain", CONFIG, {"corpus": corpus_path})
    with cut("engine.supervised", step, after):
        midtrain(request)
    assert not (request.output_path / "model.safetensors").exists()
    metrics = midtrain(request)
    assert metrics["loss"] > 0
    assert same_work(request, uninterrupted)


def test_how_often_it_is_saved_leaves_no_trace(
    new_request: Any, corpus_path: Path, uninterrupted: StageRequest, same_work: Any
) -> None:
    request = new_request("midtrain", CONFIG | {"checkpoint_every": 100}, {"corpus": corpus_path})
    midtrain(request)
    assert same_work(request, uninterrupted)


def test_the_number_of_threads_leaves_no_trace(
    new_request: Any, corpus_path: Path, uninterrupted: StageRequest, same_work: Any
) -> None:
    request = new_request("midtrain", CONFIG, {"corpus": corpus_path})
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        midtrain(request)
    finally:
        torch.set_num_threads(before)
    assert same_work(request, uninterrupted)


def test_cut_after_its_last_step_it_only_writes_its_output(
    new_request: Any, corpus_path: Path, uninterrupted: StageRequest, same_work: Any
) -> None:
    request = new_request("midtrain", CONFIG | {"checkpoint_every": STEPS}, {"corpus": corpus_path})
    midtrain(request)
    shutil.rmtree(request.output_path)
    midtrain(request)
    assert same_work(request, uninterrupted)


def test_killed_at_several_instants_it_ends_with_the_same_bits(
    new_request: Any, corpus_path: Path, workers: Any, same_work: Any
) -> None:
    config = CONFIG | {"num_steps": 24, "checkpoint_every": 1}
    whole, killed = (new_request("midtrain", config, {"corpus": corpus_path}) for _ in range(2))
    function = "engine.supervised:midtrain"
    workers.run(whole, function)
    rng = random.Random(0)
    landed = [workers.run_killed(killed, function, steps, rng.uniform(0.0, 0.05)) for steps in (0, 3, 7, 12)]
    assert sum(landed) >= 3
    workers.run(killed, function)
    assert same_work(killed, whole)
