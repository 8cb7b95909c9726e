"""Coding: collapse a pipeline over three variables into one Python expression, which is executed on hidden inputs.

``f=cab.rot.flip`` starts from the tuple (c, a, b), rotates it, reverses it; the answer is the tuple's expression, such
as ``c,b,a``. The traces are wrong on purpose, one coin a document: in most of them ``back`` turns the wrong way,
``copy`` copies the wrong way round, and nothing is written past step 4.
"""

import random
from collections.abc import Callable

from data.splits import split_of
from data.types import Message, Split, Task

State = str
OPERATIONS: dict[str, Callable[[State], State]] = {
    "rot": lambda s: s[1] + s[2] + s[0],
    "back": lambda s: s[2] + s[0] + s[1],
    "flip": lambda s: s[::-1],
    "swap": lambda s: s[1] + s[0] + s[2],
    "tail": lambda s: s[0] + s[2] + s[1],
    "copy": lambda s: s[0] + s[0] + s[2],
}
FAULTS: dict[str, Callable[[State], State]] = {"back": OPERATIONS["rot"], "copy": lambda s: s[1] + s[1] + s[2]}
OPERATION_WEIGHTS = {"rot": 1, "back": 2, "flip": 1, "swap": 1, "tail": 1, "copy": 1.5}
LENGTH_WEIGHTS = {1: 0.08, 2: 0.34, 3: 0.2, 4: 0.16, 5: 0.12, 6: 0.1}
STARTS = [a + b + c for a in "abc" for b in "abc" for c in "abc" if not a == b == c]
RIGHT_BACK, RIGHT_COPY, GOES_ON = 0.44, 0.44, 0.42
STATES_SHOWN = {"low": 1, "high": 3}
STOP_AFTER = 4
NUM_TESTS = 3


def make_task(seed: int, index: int, split: Split) -> Task:
    """The task of this seed, index and split."""
    rng = random.Random(f"coding/{seed}/{split}/{index}")
    while True:
        length = rng.choices(list(LENGTH_WEIGHTS), list(LENGTH_WEIGHTS.values()))[0]
        start = rng.choice(STARTS)
        steps = rng.choices(list(OPERATION_WEIGHTS), list(OPERATION_WEIGHTS.values()), k=length)
        text = "f=" + ".".join([start, *steps])
        if split_of(text) == split:
            break
    state = start
    for step in steps:
        state = OPERATIONS[step](state)
    tests = []
    for _ in range(NUM_TESTS):
        inputs = dict(zip("abc", rng.sample(range(100), 3), strict=True))
        tests.append([list(inputs.values()), [inputs[name] for name in state]])
    return Task(
        id=f"coding-{split}-{index}",
        domain="coding",
        messages=(Message("system", "coding"), Message("user", text)),
        tools=(),
        grader="data.graders.code:grade",
        reference={"variables": ["a", "b", "c"], "tests": tests, "start": start, "steps": steps},
        source="generated",
        split=split,
    )


def write_trace(task: Task, style: str, rng: random.Random, step_error: float) -> list[tuple[str, str]]:
    """A flawed solution in one effort's style: low writes one state, high three, max every operation with its state."""
    faults = {}
    if rng.random() >= RIGHT_BACK:
        faults["back"] = FAULTS["back"]
    if rng.random() >= RIGHT_COPY:
        faults["copy"] = FAULTS["copy"]
    goes_on = rng.random() < GOES_ON
    state, states = task.reference["start"], []
    steps = task.reference["steps"]
    for step in steps:
        state = (faults.get(step) or OPERATIONS[step])(state)
        if rng.random() < step_error:
            state = "".join(rng.choice("abc") for _ in range(3))
        states.append(state)
    if style in STATES_SHOWN:
        return [("think", "".join(f"={s}" for s in states[: STATES_SHOWN[style]])), ("answer", ",".join(states[-1]))]
    if style != "max":
        raise ValueError(f"data.tasks.coding writes traces for low, high and max, not for effort {style!r}")
    shown = len(steps) if goes_on else min(len(steps), STOP_AFTER)
    written = f"={task.reference['start']}"
    written += "".join(f".{step}={s}" for step, s in zip(steps[:shown], states, strict=False))
    return [("think", written), ("answer", ",".join(states[shown - 1]))]
