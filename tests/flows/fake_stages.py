"""Tiny real stage functions for the tests of the control plane: each writes a digest of its config and inputs."""

import hashlib
import json

from data.stage import StageRequest


def make(request: StageRequest) -> dict[str, float]:
    """Deterministic: the output depends on config and inputs only."""
    steps = int(request.config.get("num_steps", 3))
    text = json.dumps(dict(request.config), sort_keys=True)
    for role in sorted(request.inputs):
        text += role + (request.inputs[role] / "result.txt").read_text()
    with request.metrics_path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "time_s": 0.01 * step, "loss": 1.0 / step}) + "\n")
    (request.output_path / "result.txt").write_text(hashlib.sha256(text.encode()).hexdigest())
    return {"loss": 1.0 / steps}
