"""Fixtures that several packages' tests share: a small corpus, its markup, task sets, a tiny base, ways to be cut."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from data.arrow import save_rows
from data.config import CorpusConfig, DomainSource
from data.corpus import Document, fit_tokenizer, write_documents
from data.markup import Markup
from data.stage import StageRequest
from data.stages import build_corpus, build_tasks, load_tasks
from data.types import Update
from flows.errors import StageFailedError
from flows.launch import Children, Job

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in a worker: two threads on tiny tensors mostly wait for each other

settings.register_profile("nonet", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("nonet")

DOMAINS = ("coding", "general", "research")
EFFORTS = ("low", "high", "max")
MODEL = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
MUON = {"name": "muon", "lr": 2e-2, "adam_lr": 2e-2, "warmup_steps": 5, "decay": "linear"}

NewRequest = Callable[..., StageRequest]


@pytest.fixture(scope="session")
def corpus_config() -> CorpusConfig:
    paths = {
        d: DomainSource(generator=f"data.tasks.{d}:make_task", traces=f"data.tasks.{d}:write_trace") for d in DOMAINS
    }
    return CorpusConfig(
        domains=paths,
        efforts=EFFORTS,
        seed=7,
        num_documents=900,
        own_style=0.8,
        step_error=0.03,
        vocab_size=512,
    )


@pytest.fixture(scope="session")
def documents(corpus_config: CorpusConfig) -> list[Document]:
    return list(write_documents(corpus_config))


@pytest.fixture(scope="session")
def markup(documents: list[Document]) -> Markup:
    return Markup(fit_tokenizer(documents, 512))


@pytest.fixture(scope="session")
def new_request(tmp_path_factory: pytest.TempPathFactory) -> NewRequest:
    """Makes the request of a stage in a folder of its own, as the control plane would."""

    def make(kind: str, config: Mapping[str, Any], inputs: Mapping[str, Path], stage: str = "") -> StageRequest:
        folder = tmp_path_factory.mktemp(kind)
        (folder / "output").mkdir()
        return StageRequest(stage or kind, kind, config, inputs, folder)

    return make


@pytest.fixture(scope="session")
def corpus_path(new_request: NewRequest, corpus_config: CorpusConfig) -> Path:
    """The output of a corpus stage."""
    request = new_request("corpus", corpus_config.model_dump() | {"vocab_size": 320}, {})
    build_corpus(request)
    return request.output_path


@pytest.fixture(scope="session")
def task_paths(new_request: NewRequest) -> dict[str, Path]:
    """The outputs of one tasks stage a domain, by role (``tasks/coding``): 48 train and 16 test tasks each."""
    paths: dict[str, Path] = {}
    for domain in DOMAINS:
        generator = f"data.tasks.{domain}:make_task"
        config = {"domain": domain, "generator": generator, "seed": 3, "num_train": 48, "num_test": 16}
        request = new_request("tasks", config, {}, stage=f"tasks/{domain}")
        build_tasks(request)
        paths[request.stage] = request.output_path
    return paths


@pytest.fixture(scope="session")
def base_path(new_request: NewRequest, corpus_path: Path) -> Path:
    """A model's folder: it writes the markup well and mostly ends its answers, which are mostly wrong."""
    from engine.supervised import midtrain

    config = {"model": MODEL, "optimizer": MUON, "seed": 1, "num_steps": 60, "batch_size": 32}
    request = new_request("midtrain", config | {"tokens_per_micro_batch": 1024}, {"corpus": corpus_path})
    midtrain(request)
    return request.output_path


@pytest.fixture(scope="session")
def budget_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a budget stage: 12, 16, 24 tokens for low, high, max in every domain."""
    folder = tmp_path_factory.mktemp("budget")
    budgets = {f"{d}/{e}": n for d in DOMAINS for e, n in zip(EFFORTS, (12, 16, 24), strict=True)}
    (folder / "budgets.json").write_text(json.dumps(budgets))
    return folder


@pytest.fixture
def easy_path(tmp_path: Path) -> Path:
    """A tasks folder of general chains whose graded answer is always 7: habit alone can learn it."""
    config = {"domain": "general", "generator": "data.tasks.general:make_task", "seed": 5}
    request = StageRequest("t", "tasks", config | {"num_train": 24, "num_test": 4}, {}, tmp_path / "chains")
    build_tasks(request)
    rows = [
        {
            "id": task.id,
            "domain": task.domain,
            "messages": [{"role": m.role, "text": m.text} for m in task.messages],
            "tools": [],
            "grader": task.grader,
            "reference": json.dumps({"answer": "7"}),
            "source": task.source,
            "split": task.split,
        }
        for task in load_tasks(request.output_path, "train")
    ]
    save_rows(rows, tmp_path / "easy" / "train")
    return tmp_path / "easy"


class Workers:
    """Runs stage functions in real worker processes, and kills them."""

    def __init__(self) -> None:
        self._children = Children(["engine.supervised", "experts.rl", "distill.merge"])
        self._children.warm_up()

    def run(self, request: StageRequest, function: str) -> Mapping[str, float]:
        """Runs or resumes to the end; as in a run, what an earlier try left in the output goes first."""
        shutil.rmtree(request.output_path, ignore_errors=True)
        request.output_path.mkdir()
        (request.folder / "worker.lock").unlink(missing_ok=True)
        request.save(request.folder / "request.json")
        return self._children.run(
            Job(request.stage, function, request.folder / "request.json", request.folder / "log.txt", 1)
        )

    def run_killed(self, request: StageRequest, function: str, steps: int, delay_s: float) -> bool:
        """The same, but SIGKILL ``delay_s`` after the step log has ``steps`` lines; whether it came before the end."""
        ended = threading.Event()
        killer = threading.Thread(target=_kill, args=(request, steps, delay_s, ended))
        killer.start()
        try:
            self.run(request, function)
        except StageFailedError as error:
            if "was killed (SIGKILL" not in str(error):
                raise
            return True
        finally:
            ended.set()
            killer.join()
        return False

    def close(self) -> None:
        self._children.kill()


def _kill(request: StageRequest, steps: int, delay_s: float, ended: threading.Event) -> None:
    lock = request.folder / "worker.lock"
    while not ended.wait(0.002):
        owner = lock.read_text().split() if lock.exists() else []
        lines = request.metrics_path.read_bytes().count(b"\n") if request.metrics_path.exists() else 0
        if owner and lines >= steps:
            time.sleep(delay_s)
            if not ended.is_set():
                os.kill(int(owner[0]), signal.SIGKILL)
            return


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


class CutError(Exception):
    """The process is gone."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, bool], AbstractContextManager[None]]:
    """Runs a loop's function inside; the update of one step raises, ``after`` or before the weights have changed."""
    from engine.trainer import EmbeddedTrainer

    @contextmanager
    def context(module: str, step: int, after: bool) -> Iterator[None]:
        class Trainer(EmbeddedTrainer):
            def update(self, *arguments: Any) -> Update:
                if self.step + 1 == step and not after:
                    raise CutError
                update = super().update(*arguments)
                if update.step == step:
                    raise CutError
                return update

        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.EmbeddedTrainer", Trainer)
            try:
                yield
            except CutError:
                return
        pytest.fail(f"{module} ended before step {step} could be cut")

    return context


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(request: StageRequest) -> list[dict[str, float]]:
    """The step log less the clock's readings."""
    rows = [json.loads(line) for line in request.metrics_path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


@pytest.fixture(scope="session")
def same_work() -> Callable[[StageRequest, StageRequest], bool]:
    """Whether two attempts left the same output, byte for byte, and logged the same steps."""

    def same(one: StageRequest, other: StageRequest) -> bool:
        return bytes_of(one.output_path) == bytes_of(other.output_path) and rows_of(one) == rows_of(other)

    return same
