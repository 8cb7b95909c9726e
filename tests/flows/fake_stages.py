"""Tiny real stage functions for the tests of the control plane: each result is a digest of config and inputs."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import time

from data.stage import StageRequest


def make(request: StageRequest) -> dict[str, float]:
    """A stage that works: a metrics line a step, one output file."""
    text = json.dumps(dict(request.config), sort_keys=True)
    for role in sorted(request.inputs):
        text += role + (request.inputs[role] / "result.txt").read_text()
    steps = int(request.config.get("num_steps", 2))
    with request.metrics_path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "time_s": 1.7e9 + step, "loss": 1.0 / step, "kl@k": 0.5}) + "\n")
    (request.output_path / "result.txt").write_text(hashlib.sha256(text.encode()).hexdigest())
    return {"loss": 1.0 / steps}


def make_slowly(request: StageRequest) -> dict[str, float]:
    """Forty steps of 50 ms, a checkpoint each, a hash chain: the result tells if a resume lost or repeated one."""
    request.checkpoint_path.mkdir(exist_ok=True)
    path = request.checkpoint_path / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {"step": 0, "hash": "", "starts": 0}
    state["starts"] += 1
    (request.folder / "pid").write_text(str(os.getpid()))
    while state["step"] < 40:
        time.sleep(0.05)
        state["step"] += 1
        state["hash"] = hashlib.sha256(f"{state['hash']}{state['step']}".encode()).hexdigest()
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(path)
    (request.folder / "starts").write_text(str(state["starts"]))
    (request.output_path / "result.txt").write_text(state["hash"])
    return {"steps": float(state["step"])}


def make_with_a_child(request: StageRequest) -> dict[str, float]:
    """Starts a process of its own that would outlive it, then works slowly."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (request.folder / "child_pid").write_text(str(child.pid))
    return make_slowly(request)


def refuse(request: StageRequest) -> dict[str, float]:
    """Fails as a stage does for its user."""
    raise ValueError(f"stage {request.stage} cannot work\nwith this input")


def crash(request: StageRequest) -> dict[str, float]:
    """Fails as no stage should."""
    return {"x": float({}["missing"])}


def fill_disk(request: StageRequest) -> dict[str, float]:
    """Fails as a write on a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(request.output_path / "result.txt"))


def make_nothing(request: StageRequest) -> dict[str, float]:
    """Ends well without an output."""
    return {}


def make_differently(request: StageRequest) -> dict[str, float]:
    """A stage whose bytes differ at every run."""
    (request.output_path / "result.txt").write_text(str(time.time_ns()))
    return {}
