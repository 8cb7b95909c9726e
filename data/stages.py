"""The data stages: task splits of one domain, and the corpus with its tokenizer."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.arrow import load_rows, save_rows
from data.config import CorpusConfig, TaskSetConfig
from data.corpus import fit_tokenizer, make_tasks, render_document, write_documents
from data.markup import Markup
from data.stage import StageRequest
from data.tokenizer import save_tokenizer
from data.types import Message, Task


def build_tasks(request: StageRequest) -> dict[str, float]:
    """Writes ``output/train`` and ``output/test``: Hugging Face data sets, a task a row."""
    splits = make_tasks(TaskSetConfig.model_validate(request.config))
    for split, tasks in splits.items():
        save_rows([_to_row(task) for task in tasks], request.output_path / split)
    return {f"num_{split}": float(len(tasks)) for split, tasks in splits.items()}


def build_corpus(request: StageRequest) -> dict[str, float]:
    """Writes ``output/documents`` (a data set) and the tokenizer's files beside it."""
    config = CorpusConfig.model_validate(request.config)
    documents = list(write_documents(config))
    tokenizer = fit_tokenizer(documents, config.vocab_size)
    save_tokenizer(tokenizer, request.output_path)
    markup = Markup(tokenizer)
    rows = [render_document(markup, document) for document in documents]
    save_rows(rows, request.output_path / "documents")
    num_tokens = sum(len(row["token_ids"]) for row in rows)
    return {
        "num_documents": float(len(rows)),
        "tokens_per_document": num_tokens / len(rows),
        "vocab_size": float(markup.vocab_size),
    }


def load_tasks(folder: Path, split: str) -> list[Task]:
    """The tasks of one split, from the output folder of a tasks stage."""
    return [_from_row(row) for row in load_rows(folder / split)]


def _to_row(task: Task) -> dict[str, Any]:
    row = asdict(task)
    return row | {"tools": list(task.tools), "reference": json.dumps(row["reference"])}


def _from_row(row: dict[str, Any]) -> Task:
    messages = tuple(Message(**message) for message in row["messages"])
    return Task(**row | {"messages": messages, "tools": tuple(row["tools"]), "reference": json.loads(row["reference"])})
