"""One stage, from specification to record: find or open its attempt, launch the worker, hash what it wrote, commit."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data.stage import StageRequest
from flows.code_version import git_commit, source_digest
from flows.fingerprint import result_digest
from flows.launch import Children, Job
from flows.lock import Lease
from flows.specs import StageResult, StageSpec
from flows.store import Store, add_spent, read_attempt, take_manifest

Inputs = Mapping[str, StageResult]


@dataclass(frozen=True)
class Shop:
    """What every stage of a run shares."""

    store: Store
    lease: Lease
    children: Children
    recipe: str
    code: str
    commit: str

    @staticmethod
    def open(store: Store, lease: Lease, recipe: str, modules: Sequence[str] = ()) -> "Shop":
        """``modules`` are what the workers will import."""
        return Shop(store, lease, Children(modules), recipe, source_digest(), git_commit())


def find_result(shop: Shop, spec: StageSpec, inputs: Inputs) -> StageResult | None:
    """An intact earlier result of exactly this work, every byte checked."""
    return shop.store.find(spec.name, fingerprint_of(spec, inputs), check="full")


def run_stage(shop: Shop, spec: StageSpec, inputs: Inputs) -> StageResult:
    """Does the work, going on from an interrupted attempt of it where there is one.

    Raises StageFailedError, DiskFullError, InterruptedRunError, WorkspaceHeldError; the attempt stays, to be resumed.
    """
    fingerprint = fingerprint_of(spec, inputs)
    folder = shop.store.open_attempt(spec.name, fingerprint, shop.code)
    request = StageRequest(
        stage=spec.name,
        kind=spec.kind,
        config=spec.config,
        inputs={role: result.output_path for role, result in inputs.items()},
        folder=folder,
        num_threads=spec.resources.num_threads,
    )
    request.save(folder / "request.json")
    job = Job(spec.name, spec.function, folder / "request.json", folder / "log.txt", spec.resources.num_threads)
    started = time.time()
    spent_s = float(read_attempt(folder).get("spent_s", 0.0))
    try:
        metrics = shop.children.run(job)
    except BaseException:
        add_spent(folder, time.time() - started)
        raise
    manifest, sizes = take_manifest(request.output_path, spec.name)
    created = time.time()
    result = StageResult(
        stage=spec.name,
        kind=spec.kind,
        function=spec.function,
        version=spec.version,
        recipe=shop.recipe,
        fingerprint=fingerprint,
        result_id=result_digest(fingerprint, manifest),
        folder=folder,
        inputs={role: result.result_id for role, result in inputs.items()},
        config=spec.config,
        manifest=manifest,
        sizes=sizes,
        metrics=metrics,
        git_commit=shop.commit,
        code=shop.code,
        started=started,
        created=created,
        duration_s=spent_s + created - started,
    )
    shop.store.commit(result, shop.lease)
    return result


def fingerprint_of(spec: StageSpec, inputs: Inputs) -> str:
    return spec.fingerprint({role: result.result_id for role, result in inputs.items()})
