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

        ``completion_ids`` is all that followed the prompt; every turn ends with the stop token. An episode is over when
        its last turn is not exactly one call, the task has no tool, or ``max_turns`` turns were taken. Raises
        ValueError for a tool that does not resolve.
        """
        turns: list[list[int]] = [[]]
        for token_id in completion_ids:
            if token_id == self._markup.stop_id:
                turns.append([])
            else:
                turns[-1].append(token_id)
        parsed = [self._markup.parse(turn, "stop").channels for turn in turns if turn]
        calls = [[text for channel, text in channels if channel == "call"] for channels in parsed]
        if not calls or len(calls[-1]) != 1 or parsed[-1][-1][0] != "call" or len(calls) >= self._max_turns:
            return None
        if not task.tools:
            return None
        history = [turn[-1] for turn in calls if turn]
        return self._markup.render_result(self._run_tool(_tool(task.tools[0]), task, history))

    def _run_tool(self, tool: Tool, task: Task, calls: list[str]) -> str:
        try:
            return tool(task, calls[-1], calls[:-1])
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
