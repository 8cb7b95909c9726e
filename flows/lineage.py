"""Where a result comes from: the records it was made from, as text, mermaid or JSON; one node a stage."""

from collections.abc import Mapping
from typing import Any

from flows.specs import StageResult
from flows.store import Store


def ancestors(store: Store, result: StageResult) -> dict[str, StageResult]:
    """``result`` and all that it descends from, by result id, nearest first. What was deleted since is left out."""
    made: dict[str, StageResult] = {}
    for other in sorted(store.all_results(), key=lambda r: r.created):
        made[other.result_id] = other
    found: dict[str, StageResult] = {}
    waiting = [result]
    while waiting:
        nearest = waiting.pop(0)
        if nearest.result_id not in found:
            found[nearest.result_id] = nearest
            waiting += [made[i] for i in nearest.inputs.values() if i in made]
    return found


def lineage_rows(nodes: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """For --json: a node a row, inputs as role → result id."""
    return [
        {
            "stage": result.stage,
            "result_id": result.result_id,
            "attempt": result.attempt,
            "folder": str(result.folder),
            "git_commit": result.git_commit,
            "created": result.created,
            "inputs": dict(result.inputs),
        }
        for result in nodes.values()
    ]


def lineage_text(nodes: Mapping[str, StageResult]) -> str:
    """A line a stage, from the student back to the data, with what it was made from."""
    width = max(len(result.stage) for result in nodes.values())
    lines = []
    for result_id, result in nodes.items():
        made_from = dict.fromkeys(nodes[i].stage if i in nodes else f"{i[:12]} (gone)" for i in result.inputs.values())
        inputs = f"  ← {', '.join(made_from)}" if made_from else ""
        lines.append(f"{result.stage:<{width}}  {result_id[:12]}  attempt {result.attempt}{inputs}")
    return "\n".join(lines)


def lineage_mermaid(nodes: Mapping[str, StageResult]) -> str:
    """A mermaid flowchart, from data to student."""
    names = {result_id: f"s{i}" for i, result_id in enumerate(nodes)}
    lines = ["flowchart LR"]
    for result_id, result in nodes.items():
        lines.append(f'  {names[result_id]}["{result.stage}<br/>{result_id[:12]}"]')
    edges = dict.fromkeys((i, result_id) for result_id, r in nodes.items() for i in r.inputs.values() if i in names)
    lines += [f"  {names[start]} --> {names[end]}" for start, end in edges]
    return "\n".join(lines)
