"""Fixtures that several packages' tests share: a small corpus, its tokenizer and markup."""

import pytest

from data.config import CorpusConfig, DomainSource
from data.corpus import Document, fit_tokenizer, write_documents
from data.markup import Markup

DOMAINS = ("coding", "general", "research")


@pytest.fixture(scope="session")
def corpus_config() -> CorpusConfig:
    paths = {
        d: DomainSource(generator=f"data.tasks.{d}:make_task", traces=f"data.tasks.{d}:write_trace") for d in DOMAINS
    }
    return CorpusConfig(
        domains=paths,
        efforts=("low", "high", "max"),
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
