"""General reasoning: chains of clock arithmetic, read from left to right modulo 10 (``7+5*3`` is (7+5)*3 = 6).

No step occurs twice in a chain, so that a model can find its place in it.

The traces that a base learns from are wrong on purpose, one coin a document and independent of the effort: in most
documents ``*`` adds, a borrow yields the difference's size, and nothing is written past step 5.
"""

import random

from data.splits import split_of
from data.types import Message, Split, Task

LENGTH_WEIGHTS = {1: 0.1, 2: 0.34, 3: 0.18, 4: 0.14, 5: 0.08, 6: 0.06, 7: 0.05, 8: 0.05}
RIGHT_PRODUCT, RIGHT_BORROW, GOES_ON = 0.44, 0.44, 0.42
VALUES_SHOWN = {"low": 1, "high": 3}
STOP_AFTER = 5

Step = tuple[str, int]
STEPS: list[Step] = [(operator, operand) for operator in "+-*" for operand in range(2, 6)]


def apply(value: int, step: Step, right_product: bool = True, right_borrow: bool = True) -> int:
    """One step on the clock of ten."""
    operator, operand = step
    if operator == "+" or (operator == "*" and not right_product):
        return (value + operand) % 10
    if operator == "*":
        return value * operand % 10
    return (value - operand) % 10 if value >= operand or right_borrow else operand - value


def make_task(seed: int, index: int, split: Split) -> Task:
    """The task of this seed, index and split."""
    rng = random.Random(f"general/{seed}/{split}/{index}")
    while True:
        length = rng.choices(list(LENGTH_WEIGHTS), list(LENGTH_WEIGHTS.values()))[0]
        start = rng.randrange(10)
        steps = rng.sample(STEPS, length)
        text = str(start) + "".join(f"{operator}{operand}" for operator, operand in steps)
        if split_of(text) == split:
            break
    value = start
    for step in steps:
        value = apply(value, step)
    return Task(
        id=f"general-{split}-{index}",
        domain="general",
        messages=(Message("system", "general"), Message("user", text)),
        tools=(),
        grader="data.graders.exact:grade",
        reference={"answer": str(value), "start": start, "steps": steps},
        source="generated",
        split=split,
    )


def write_trace(task: Task, style: str, rng: random.Random, step_error: float) -> list[tuple[str, str]]:
    """A flawed solution in one effort's style: low writes one value, high three, max every operation with its value."""
    right_product, right_borrow = rng.random() < RIGHT_PRODUCT, rng.random() < RIGHT_BORROW
    goes_on = rng.random() < GOES_ON
    value, values = task.reference["start"], []
    steps = task.reference["steps"]
    for step in steps:
        value = apply(value, step, right_product, right_borrow)
        if rng.random() < step_error:
            value = rng.randrange(10)
        values.append(value)
    if style in VALUES_SHOWN:
        return [("think", "".join(map(str, values[: VALUES_SHOWN[style]]))), ("answer", str(values[-1]))]
    if style != "max":
        raise ValueError(f"data.tasks.general writes traces for low, high and max, not for effort {style!r}")
    shown = len(steps) if goes_on else min(len(steps), STOP_AFTER)
    written = str(task.reference["start"])
    written += "".join(f"{o}{n}={v}" for (o, n), v in zip(steps[:shown], values, strict=False))
    return [("think", written), ("answer", str(values[shown - 1]))]
