"""A stage before it runs (StageSpec) and after (StageResult), and the table of stage kinds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.fingerprint import stage_fingerprint


@dataclass(frozen=True, slots=True)
class Kind:
    """``version`` is bumped by hand when the meaning of a kind changes without its configuration changing."""

    function: str
    version: int
    makes_model: bool = False


KINDS: dict[str, Kind] = {
    "tasks": Kind("data.stages:build_tasks", 1),
    "corpus": Kind("data.stages:build_corpus", 1),
    "midtrain": Kind("engine.supervised:midtrain", 1, makes_model=True),
    "budget": Kind("engine.budget:measure", 1),
    "expert": Kind("experts.rl:train", 1, makes_model=True),
    "distill": Kind("distill.merge:train", 1, makes_model=True),
    "evaluate": Kind("engine.evaluate:evaluate", 1),
    "export": Kind("engine.export:export", 1, makes_model=True),
    "report": Kind("flows.report.page:build", 1),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Where and on how much a stage runs: outside its identity by type."""

    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage will do. ``inputs`` maps a role to the name of the stage that fills it."""

    name: str
    kind: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    function: str
    version: int
    resources: Resources = field(default_factory=Resources)

    def fingerprint(self, result_ids: Mapping[str, str]) -> str:
        """``result_ids`` maps a role to the result id of its input."""
        return stage_fingerprint(self.kind, self.function, self.version, self.config, result_ids)


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage left behind; ``inputs`` maps a role to a result id, ``manifest`` an output file to its SHA-256.

    ``started`` and ``created`` are seconds since the epoch; ``duration_s`` sums the attempt's working time, the parts
    before an interruption included. ``sizes`` maps an output file to (bytes, mtime in ns): a shortcut for checking.
    """

    stage: str
    kind: str
    function: str
    version: int
    recipe: str
    fingerprint: str
    result_id: str
    folder: Path
    inputs: Mapping[str, str]
    config: Mapping[str, Any]
    manifest: Mapping[str, str]
    sizes: Mapping[str, tuple[int, int]]
    metrics: Mapping[str, float]
    git_commit: str
    code: str
    started: float
    created: float
    duration_s: float

    @property
    def output_path(self) -> Path:
        return self.folder / "output"

    @property
    def attempt(self) -> int:
        return int(self.folder.name)

    @property
    def key(self) -> str:
        """Names this very attempt in a tracking server: stage, fingerprint, attempt."""
        return f"{self.stage}/{self.fingerprint[:12]}/{self.attempt}"

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["folder"]
        return row

    @staticmethod
    def from_json(row: Mapping[str, Any], folder: Path) -> "StageResult":
        sizes = {path: (size, time) for path, (size, time) in row["sizes"].items()}
        return StageResult(**{**row, "folder": folder, "sizes": sizes})
