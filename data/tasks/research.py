"""Research: follow one to four links through a corpus with a search tool, and answer with a citation.

``Ann.friend.boss`` asks for the boss of Ann's friend. Each task has a corpus of its own (so that nothing can be known
by heart); ``search`` answers ``Ann.friend`` with the value and its document, ``Bo@k``, and some searches fail once. The
traces are wrong on purpose, one coin a document: most cite nothing, ask about the first person again at the second
link, and give up when a search fails.
"""

import json
import random
from collections.abc import Sequence

from data.splits import split_of
from data.types import Message, Split, Task

NAMES = ("Ann", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ida", "Jo", "Kim", "Lou", "Mae", "Ned", "Ora", "Pam")
RELATIONS = ("friend", "boss", "aunt", "pal")
DOCUMENTS = "abcdefghijkl"
HOP_WEIGHTS = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}
FAILS_ONCE = 0.12
NOTHING = "none"
CITES, NEXT_PERSON, RETRIES = 0.44, 0.46, 0.42
CALLS = {"low": 1, "high": 2, "max": 8}


def make_task(seed: int, index: int, split: Split) -> Task:
    """The task of this seed, index and split. ``reference["documents"]`` maps a query to (value, document)."""
    rng = random.Random(f"research/{seed}/{split}/{index}")
    while True:
        text, queries, documents = _draw_corpus(rng)
        if split_of(text + json.dumps(documents)) == split:
            break
    value, document = documents[queries[-1]]
    return Task(
        id=f"research-{split}-{index}",
        domain="research",
        messages=(Message("system", "research"), Message("user", text)),
        tools=("data.tasks.research:search",),
        grader="data.graders.citation:grade",
        reference={
            "answer": value,
            "document": document,
            "documents": documents,
            "fails": sorted({query for query in queries if rng.random() < FAILS_ONCE}),
        },
        source="generated",
        split=split,
    )


def _draw_corpus(rng: random.Random) -> tuple[str, list[str], dict[str, list[str]]]:
    """A question, the queries that answer it, and a corpus of one document a letter that holds them."""
    hops = rng.choices(list(HOP_WEIGHTS), list(HOP_WEIGHTS.values()))[0]
    relations = [rng.choice(RELATIONS) for _ in range(hops)]
    chain = rng.sample(NAMES, hops + 1)
    ids = rng.sample(DOCUMENTS, len(DOCUMENTS))
    queries = [f"{person}.{relation}" for person, relation in zip(chain, relations, strict=False)]
    documents = {query: [value, ids.pop()] for query, value in zip(queries, chain[1:], strict=True)}
    while ids:
        query = f"{rng.choice(NAMES)}.{rng.choice(RELATIONS)}"
        if query not in documents:
            documents[query] = [rng.choice(NAMES), ids.pop()]
    return ".".join([chain[0], *relations]), queries, documents


def search(task: Task, query: str, history: Sequence[str]) -> str:
    """``value@document`` for a query such as ``Ann.friend``; ``none`` when nothing is found or it fails once."""
    documents = task.reference["documents"]
    if query not in documents or (query in task.reference["fails"] and query not in history):
        return NOTHING
    value, document = documents[query]
    return f"{value}@{document}"


def write_trace(task: Task, style: str, rng: random.Random, step_error: float) -> list[tuple[str, str]]:
    """A flawed episode in one effort's style: at most 1, 2 or 8 searches for low, high and max."""
    if style not in CALLS:
        raise ValueError(f"data.tasks.research writes traces for low, high and max, not for effort {style!r}")
    cites, next_person = rng.random() < CITES, rng.random() < NEXT_PERSON
    retries = rng.random() < RETRIES
    start, *relations = task.messages[-1].text.split(".")
    calls: list[str] = []
    trace: list[tuple[str, str]] = []
    person, found = start, NOTHING
    for hop, relation in enumerate(relations):
        asked = start if hop == 1 and not next_person else person
        if rng.random() < step_error:
            asked = rng.choice(NAMES)
        query = f"{asked}.{relation}"
        for _ in range(2 if retries else 1):
            if len(calls) == CALLS[style]:
                break
            found = search(task, query, calls)
            calls.append(query)
            trace += [("call", query), ("result", found)]
            if found != NOTHING:
                break
        if found == NOTHING or len(calls) == CALLS[style]:
            break
        person = found.split("@")[0]
    if found == NOTHING:
        found = f"{rng.choice(NAMES)}@{rng.choice(DOCUMENTS)}"
    return [*trace, ("answer", found if cites else found.split("@")[0])]
