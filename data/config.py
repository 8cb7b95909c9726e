"""Configuration of everything below the engine: task sets, corpus, tokenizer. Imports nothing heavy."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DottedPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]


class Config(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DomainSource(Config):
    """A domain in the corpus: ``generator(seed, index, split) -> Task`` and ``traces(task, style, rng, step_error)``.

    ``share`` is its weight among the documents: 2 gives it twice as many as a domain with 1.
    """

    generator: DottedPath
    traces: DottedPath
    share: PositiveInt = 1


class TaskSetConfig(Config):
    """One domain's tasks: ``generator(seed, index, split) -> Task`` and how many of each split."""

    domain: str
    generator: DottedPath
    seed: int
    num_train: PositiveInt
    num_test: PositiveInt


class CorpusConfig(Config):
    """Mid-training documents: traces in every domain and effort, imperfect on purpose.

    ``own_style`` is the share of documents written in the style of the effort that they name; ``step_error`` the share
    of steps with a random slip. The systematic faults are the trace writers' own (see data/tasks).
    """

    domains: dict[str, DomainSource]
    efforts: tuple[str, ...]
    seed: int
    num_documents: PositiveInt
    own_style: Probability
    step_error: Probability
    vocab_size: PositiveInt
