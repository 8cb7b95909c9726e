"""Episodes as the environment sees them: a turn that ends in a call gets a tool's result, any other ends it all."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

from data.dotted import resolve
from data.markup import Markup
from data.types import Task, Transcript, Verdict

Tool = Callable[[Task, str, Sequence[str]], str]
TOOL_ERROR = "error"


class Harness:
    """Answers tool calls of a batch of episodes. ``num_tool_errors`` counts tools that raised: text for the model."""

    def __init__(self, markup: Markup, max_turns: int):
        self._markup = markup
        self._max_turns = max_turns
        self.num_tool_errors = 0

    def respond(self, task: Task, completion_ids: Sequence[int]) -> list[int] | None:
        """Token ids to insert after a turn that ended, or None when the episode is over.

        ``completion_ids`` is all that followed the prompt. An episode is over when its turn called no tool, the task
        has none, or ``max_turns`` turns were taken.
        """
        channels = self._markup.parse(completion_ids, "stop").channels
        calls = [text for channel, text in channels if channel == "call"]
        if not channels or channels[-1][0] != "call" or not task.tools or len(calls) >= self._max_turns:
            return None
        return self._markup.render_result(self._run_tool(task, calls))

    def _run_tool(self, task: Task, calls: list[str]) -> str:
        try:
            return _tool(task.tools[0])(task, calls[-1], calls[:-1])
        except Exception:
            self.num_tool_errors += 1
            return TOOL_ERROR


def grade(pairs: Sequence[tuple[Task, Transcript]]) -> list[Verdict]:
    """Verdicts in order, each task by its own grader, a grader called once for all of its tasks."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i][0].grader)
    verdicts: dict[int, Verdict] = {}
    for path, members in groupby(order, key=lambda i: pairs[i][0].grader):
        indices = list(members)
        results = resolve(path)([pairs[i] for i in indices])
        if len(results) != len(indices):
            raise ValueError(
                f"grader {path} gave {len(results)} verdicts for {len(indices)} episodes; it owes one each"
            )
        verdicts.update(zip(indices, results, strict=True))
    return [verdicts[i] for i in range(len(pairs))]


@cache
def _tool(path: str) -> Tool:
    return resolve(path)
