"""The mid-training corpus: flawed traces in every domain and effort, as token ids with their loss mask."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from data.config import CorpusConfig, TaskSetConfig
from data.dotted import resolve
from data.markup import Markup
from data.tokenizer import train_tokenizer
from data.types import Task

NUM_TOKENIZER_DOCUMENTS = 4000


@dataclass(frozen=True, slots=True)
class Document:
    """A task, the effort that its prompt names and a trace in the style of ``style`` (not always that effort)."""

    task: Task
    effort: str
    style: str
    trace: list[tuple[str, str]]


def write_documents(config: CorpusConfig) -> Iterator[Document]:
    """All documents, deterministic from ``config.seed``; cells take turns by share, tasks come from train."""
    sources = sorted(config.domains.items())
    writers = {domain: (resolve(source.generator), resolve(source.traces)) for domain, source in sources}
    cells = [(domain, effort) for domain, source in sources for effort in config.efforts for _ in range(source.share)]
    for index in range(config.num_documents):
        rng = random.Random(f"corpus/{config.seed}/{index}")
        domain, effort = cells[index % len(cells)]
        make_task, write_trace = writers[domain]
        task = _checked(make_task(config.seed, index, "train"), domain, "train")
        others = [e for e in config.efforts if e != effort] or [effort]
        style = effort if rng.random() < config.own_style else rng.choice(others)
        yield Document(task, effort, style, write_trace(task, style, rng, config.step_error))


def fit_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """A BPE trained on the plain text of the first documents."""
    texts: list[str] = []
    for document in documents[:NUM_TOKENIZER_DOCUMENTS]:
        options = [m.text for m in document.task.messages if m.role == "system"]
        texts.append(" ".join([document.effort, *options]))
        texts += [m.text for m in document.task.messages if m.role == "user"]
        texts += [text for _, text in document.trace]
    return train_tokenizer(texts, vocab_size)


def render_document(markup: Markup, document: Document) -> dict[str, Any]:
    """One row of the corpus: readable text, token ids and the mask of the tokens that the assistant writes."""
    prompt = markup.render_prompt(document.task, document.effort)
    ids, mask = markup.render_completion(document.trace)
    token_ids = [*prompt.token_ids_T, *ids]
    return {
        "domain": document.task.domain,
        "effort": document.effort,
        "style": document.style,
        "text": markup.decode(token_ids),
        "token_ids": token_ids,
        "loss_mask": [False] * len(prompt.token_ids_T) + mask,
    }


def make_tasks(config: TaskSetConfig, attempts_per_task: int = 20) -> dict[str, list[Task]]:
    """The train and test splits. A test split holds no task twice; train may repeat short ones.

    Raises ValueError when the generator cannot find enough different test tasks.
    """
    make_task: Callable[[int, int, str], Task] = resolve(config.generator)
    train = [_checked(make_task(config.seed, i, "train"), config.domain, "train") for i in range(config.num_train)]
    test: dict[str, Task] = {}
    for index in range(attempts_per_task * config.num_test):
        task = _checked(make_task(config.seed, index, "test"), config.domain, "test")
        test.setdefault(task_key(task), task)
        if len(test) == config.num_test:
            break
    else:
        raise ValueError(
            f"{config.generator} found only {len(test)} different test tasks of {config.num_test}; "
            f"lower domains.{config.domain}.num_test"
        )
    overlap = test.keys() & {task_key(task) for task in train}
    if overlap:
        raise ValueError(
            f"{config.generator}: {len(overlap)} test tasks are in train too; decide the split with split_of"
        )
    return {"train": train, "test": list(test.values())}


def _checked(task: Task, domain: str, split: str) -> Task:
    if (task.domain, task.split) != (domain, split):
        raise ValueError(
            f"task {task.id} says domain {task.domain!r}, split {task.split!r}, not {domain!r}, {split!r}: "
            f"the generator must name its tasks as the table domains.{domain} is called"
        )
    return task


def task_key(task: Task) -> str:
    """What makes two tasks the same: the messages and the documents that the tools know."""
    documents = task.reference.get("documents", {})
    return repr([(m.role, m.text) for m in task.messages]) + repr(sorted(documents.items()))
