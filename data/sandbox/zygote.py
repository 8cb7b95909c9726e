"""The sandbox's zygote, a script: forks one confined child a job, so that a job costs a millisecond or two.

Frames on stdin: 4 bytes of length, then a job (JSON); frames on stdout: one byte of status, 4 bytes of length, what the
child wrote. The zygote never reads what a child wrote, and never learns what a right result would be. It ends when its
stdin does. Imports nothing of this project: it runs isolated from it.
"""

import builtins
import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NamedTuple, NoReturn

EXITED, DIED, TIMED_OUT, NOT_STARTED, HELLO = b"e", b"d", b"t", b"n", b"h"
READY = b"R"
PIPE = 0
NOBODY = 65534
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
ENCODE = json.JSONEncoder(allow_nan=False).encode
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_NAMES = (
    "abs all any bool chr divmod enumerate filter float frozenset int isinstance len list map max min ord pow range "
    "repr reversed round set slice sorted str sum tuple zip dict"
)
BUILTINS = {name: getattr(builtins, name) for name in _NAMES.split()}


class Limits(NamedTuple):
    """Of one child. The wall limit is only for code that sleeps: a busy machine must not fail honest code."""

    cpu_s: int = 1
    wall_s: float = 20.0
    memory_bytes: int = 256 << 20
    output_bytes: int = 1 << 16


def main(limits: Limits) -> None:
    """Serves jobs until stdin ends."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    separate(requests, replies)
    leave_files()
    gc.freeze()
    send(replies, HELLO, b"")
    while (frame := receive(requests)) is not None:
        send(replies, *run_job(json.loads(frame), limits, requests))


def separate(requests: int, replies: int) -> None:
    """Moves on into namespaces without network and with no other process in sight, where the kernel lets us.

    The process that was started stays behind and waits; when it dies so does everything in the namespaces.
    """
    if LIBC is None:
        return
    flags = _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    separated = not LIBC.unshare(flags if os.geteuid() == 0 else flags | _CLONE_NEWUSER)
    if separated and (inner := os.fork()):
        os.close(requests)
        os.close(replies)
        os.waitpid(inner, 0)
        os._exit(0)
    if separated:
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def leave_files() -> None:
    """Moves into an empty, deleted folder, where the kernel lets us: no path leads out, and nothing can be made in it.

    The folder is made in the working directory, which the parent chose.
    """
    folder = f"{os.getcwd()}/nonet-sandbox-{os.urandom(8).hex()}"
    with contextlib.suppress(OSError):
        os.mkdir(folder)
        os.chdir(folder)
        os.rmdir(folder)
        os.chroot(".")


def run_job(job: dict[str, Any], limits: Limits, requests: int) -> tuple[bytes, bytes]:
    """Status and output of one child. Its output counts only with ``EXITED``: a clean exit in time.

    A child is ended early when ``requests``, where the next job would come from, has lost its other end.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return NOT_STARTED, str(error).encode()
    if pid == 0:
        run_child(job, writer, limits)
    os.close(writer)
    output, ended = read_until_end(reader, requests, time.monotonic() + limits.wall_s, limits.output_bytes)
    os.close(reader)
    os.kill(pid, signal.SIGKILL)  # a no-op for a child that exits: its status is already set when its pipe closes
    _, status = os.waitpid(pid, 0)
    if not output.startswith(READY):
        return NOT_STARTED, output or f"a child ended with status {status} before it was confined".encode()
    if not ended:
        return TIMED_OUT, b""
    if status == 0:
        return EXITED, output[len(READY) :]
    number = status & 127
    return DIED, (signal.strsignal(number) or f"signal {number}" if number else f"exit {status >> 8}").encode()


def read_until_end(reader: int, requests: int, deadline: float, most: int) -> tuple[bytes, bool]:
    """What a child writes until it ends; False when it was late, wrote over ``most`` bytes or lost its reader."""
    output = b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(requests, 0)  # only to hear that it hung up
    while (left := deadline - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
        if requests in ready:
            return output, False
        if ready:
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return output, True
            output += chunk
            if len(output) > most + len(READY):
                return output, False
    return output, False


def run_child(job: dict[str, Any], writer: int, limits: Limits) -> NoReturn:
    """Confines itself, says so, evaluates, writes the result and exits."""
    try:
        os.dup2(writer, PIPE)
        try:
            confine(limits)
        except BaseException as error:
            os.write(PIPE, f"a child could not be confined: {error}".encode())
            os._exit(1)
        os.write(PIPE, READY)
        result = evaluate(job)
        while result:
            result = result[os.write(PIPE, result) :]
        os._exit(0)
    finally:
        os._exit(1)


def confine(limits: Limits) -> None:
    """Nothing open but the result's pipe, little of anything, no privileges."""
    os.setsid()
    os.closerange(PIPE + 1, 256)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (PIPE + 1, PIPE + 1))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    if LIBC is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def evaluate(job: dict[str, Any]) -> bytes:
    """The expression's value for every input, as strict JSON; or the name of the error that it raised."""
    try:
        code = compile(job["expression"], "<answer>", "eval")
        values = []
        for row in job["inputs"]:
            names = {"__builtins__": BUILTINS.copy(), **dict(zip(job["variables"], row, strict=True))}
            values.append(encode(eval(code, names)))
        return ENCODE({"values": values}).encode()
    except BaseException as error:
        return ENCODE({"error": type(error).__name__[:80]}).encode()


def encode(value: Any) -> Any:
    """A value of exact built-in type, tuples told from lists. Raises TypeError for anything else, also subclasses."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is tuple:
        return {"tuple": [encode(v) for v in value]}
    if kind is list:
        return [encode(v) for v in value]
    raise TypeError(kind.__name__)


def receive(stream: int) -> bytes | None:
    header = read_exactly(stream, 4)
    return None if header is None else read_exactly(stream, struct.unpack(">I", header)[0])


def read_exactly(stream: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(stream, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def send(stream: int, status: bytes, payload: bytes) -> None:
    data = status + struct.pack(">I", len(payload)) + payload
    while data:
        data = data[os.write(stream, data) :]


if __name__ == "__main__":
    main(Limits(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
