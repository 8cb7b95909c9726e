"""The private Prefect server of a workspace: started for one run, on loopback, with its database in the workspace.

Prefect's own ephemeral server does the same, but outlives a killed parent and logs to the terminal.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flows.errors import InterruptedRunError, OrchestratorError
from flows.launch import end_child, start_child
from flows.templates import adopt_template
from flows.workspace import Workspace

START_TIMEOUT_S = 180.0
_DRAIN_S = 10.0
_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_COLORS": "false",
}


class Server:
    """A Prefect server process; ``wait`` blocks until it answers."""

    def __init__(self, workspace: Workspace) -> None:
        self.log_path = workspace.prefect_path / "server.log"
        self.port = _free_port()
        self.api_url = f"http://127.0.0.1:{self.port}/api"
        workspace.prefect_path.mkdir(exist_ok=True)
        adopt_template("prefect", workspace.prefect_path / "prefect.db")
        self._log = self.log_path.open("ab")
        self._process = _start(workspace.prefect_path, self.port, self._log)

    def wait(self, stopping: threading.Event) -> None:
        """Raises OrchestratorError when the server ends or does not answer in time, InterruptedRunError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if stopping.is_set():
                raise InterruptedRunError("the run was stopped while the Prefect server was starting")
            if self._process.poll() is not None:
                raise OrchestratorError(f"the Prefect server ended at once; its log: {self.log_path}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.api_url}/health", timeout=5).close()
                return
            time.sleep(0.05)
        raise OrchestratorError(
            f"the Prefect server did not answer in {START_TIMEOUT_S:.0f} s; its log: {self.log_path}"
        )

    def stop(self) -> None:
        end_child(self._process, grace_s=5.0)
        self._log.close()


@contextlib.contextmanager
def orchestrator(workspace: Workspace, stopping: threading.Event) -> Iterator[None]:
    """Points Prefect at a server for the block: the one that PREFECT_API_URL names, or a private one.

    Must be entered before prefect is imported: its settings are read once.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    server = Server(workspace)
    logging.raiseExceptions = False  # a log line that does not reach the server is no news for the terminal
    before = dict(os.environ)
    os.environ.update(_settings(workspace.prefect_path), PREFECT_API_URL=server.api_url)
    try:
        import prefect.main  # noqa: F401  # a second of imports while the server starts

        server.wait(stopping)
        try:
            yield
        finally:
            _send_pending()
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def _send_pending() -> None:
    """What Prefect's background threads still hold goes out while there is a server; else each retries for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=_DRAIN_S, at_exit=True)


def _settings(home: Path) -> dict[str, str]:
    return {**_SETTINGS, "PREFECT_HOME": str(home), "PREFECT_PROFILES_PATH": str(home / "profiles.toml")}


def _start(home: Path, port: int, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    own = {"PREFECT_UI_ENABLED": "false", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
    command = [sys.executable, "-m", "flows.server", str(port)]
    return start_child(command, log, {**kept, **_settings(home), **own})


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
