"""The process sandbox: honest code gets its values, hostile code gets nothing, and a dying zygote is survived."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.sandbox.process import Job, JobResult, Sandbox, SandboxUnavailableError
from data.sandbox.zygote import Limits

# From any object to the real os module, past the few builtins that an expression is given.
OS = "[k for k in ().__class__.__base__.__subclasses__() if k.__name__ == '_wrap_close'][0].__init__.__globals__"

# Exits with 0 where this user may have namespaces of its own, as root or inside a user namespace.
PROBE = "import ctypes, os; assert not ctypes.CDLL(None).unshare(0x68000000 | (0x10000000 if os.geteuid() else 0))"
needs_namespaces = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode != 0,
    reason="without namespaces the tier 'process' does not keep hostile code from signals and file names",
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(wall_s=1.5)) as running:
        yield running


def run(sandbox: Sandbox, expression: str, *inputs: tuple[int | str, ...]) -> JobResult:
    return sandbox.run([Job(expression, ("a", "b", "c"), inputs or ((1, 2, 3),))])[0]


def zygotes() -> list[int]:
    """Every zygote below this process, and the children that they run jobs in."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parent_of = {int(pid): int(ppid) for pid, ppid, args in rows if "zygote.py" in args}
    found = {os.getpid()}
    for _ in range(3):
        found |= {pid for pid, parent in parent_of.items() if parent in found}
    return sorted(found - {os.getpid()})


def wait_until_busy(others: set[int], idle: int) -> set[int]:
    """The processes of a sandbox that has a job running for 0.2 s; ``idle`` is their number when it has none."""
    before: set[int] = set()
    for _ in range(100):
        now = set(zygotes()) - others
        if now == before and len(now) == idle + 1:
            return now
        before = now
        time.sleep(0.2)
    raise TimeoutError(f"no job runs; the sandbox's processes are {before}")


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("c,b,a", ((3, 2, 1), (6, 5, 4))),
        ("a + b * c", (7, 34)),
        ("sorted([c, a, b])", ([1, 2, 3], [4, 5, 6])),
        ("(str(a) + 'é', a == 1, None, a / 2)", (("1é", True, None, 0.5), ("4é", False, None, 2.0))),
        ("max(a, b) if a > b else (a, (b, c))", ((1, (2, 3)), (4, (5, 6)))),
    ],
)
def test_values_keep_their_exact_types(sandbox: Sandbox, expression: str, values: tuple[object, ...]) -> None:
    result = run(sandbox, expression, (1, 2, 3), (4, 5, 6))
    assert result == JobResult("ok", values)
    assert repr(result.values) == repr(values)


@pytest.mark.parametrize(
    ("expression", "detail"),
    [
        ("a +", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("d", "NameError"),
        ("__import__('os')", "NameError"),
        ("open('/etc/passwd')", "NameError"),
        ("float('nan')", "TypeError"),
        ("{1, 2}", "TypeError"),
        ("[0] * 10**10", "MemoryError"),
        ("'x' * 10**5 + 1", "TypeError"),
        ("(" * 200, "SyntaxError"),
    ],
)
def test_errors_are_named(sandbox: Sandbox, expression: str, detail: str) -> None:
    assert run(sandbox, expression) == JobResult("error", detail=detail)


@pytest.mark.parametrize("expression", ["9**9**9**9", "sum(range(10**12))", f"{OS}['sys'].modules['time'].sleep(60)"])
def test_endless_work_is_ended(sandbox: Sandbox, expression: str) -> None:
    began = time.monotonic()
    assert run(sandbox, expression).status == "timeout"
    assert time.monotonic() - began < 6


def test_endless_output_is_cut_off(sandbox: Sandbox) -> None:
    assert run(sandbox, "'x' * 10**6").status == "timeout"


@needs_namespaces
@pytest.mark.parametrize(
    ("attack", "defence"),
    [
        (f"{OS}['_exit'](0)", "error"),  # a clean exit without a result
        (f"{OS}['kill']({OS}['getppid'](), 9) or 1 / 0", "error"),
        (f"{OS}['fork']()", "error"),
        (f"{OS}['open']('/etc/hostname', 0)", "error"),
        (f"{OS}['sys'].modules['socket']", "error"),
        (f"{OS}['write'](1, b'e')", "error"),  # the zygote's own pipes are closed
        (f"{OS}['write'](0, b'[' * 60000) and {OS}['_exit'](0)", "error"),
        (f"{OS}['mkdir']('/tmp/nonet-escape')", "error"),
        (f"{OS}['symlink']('/etc/hostname', 'nonet-escape')", "error"),
        (f"{OS}['execv']('/bin/true', ['true'])", "error"),
        (f"{OS}['abort']()", "killed"),
        (f"{OS}['kill']({OS}['getpid'](), 40)", "killed"),
        ("type('T', (tuple,), {'__eq__': lambda s, o: True})((a, b))", "error"),
        ("(lambda f: f(f))(lambda f: f(f))", "error"),
    ],
)
def test_attacks_end_in_a_failure_and_leave_the_zygote_alone(sandbox: Sandbox, attack: str, defence: str) -> None:
    before = zygotes()
    attack_result, honest_result = sandbox.run([Job(attack, ("a", "b"), ((1, 2),)), Job("a+b", ("a", "b"), ((1, 2),))])
    assert attack_result.status == defence
    assert honest_result == JobResult("ok", (3,))
    assert zygotes() == before


@needs_namespaces
def test_nothing_of_this_process_is_visible(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NONET_CANARY", "secret")
    with Sandbox() as fresh:
        result = run(fresh, f"sorted({OS}['environ'])")
    assert result == JobResult("ok", (["LC_CTYPE", "PYTHONHASHSEED"],))  # LC_CTYPE is the interpreter's own
    for path in ("/etc/hostname", "/proc/self", os.getcwd(), ".."):
        looked = run(sandbox, f"{OS}['stat']({path!r})[3]")  # number of names that it has: the root itself has none
        assert looked in (JobResult("error", detail="FileNotFoundError"), JobResult("ok", (0,)))
    assert run(sandbox, f"'data' in {OS}['sys'].modules or 'site' in {OS}['sys'].modules").values == (False,)


def test_a_forged_error_is_fit_for_any_file(sandbox: Sandbox) -> None:
    forged = '{"error": "\\ud800' + "x" * 100 + '"}'
    result = run(sandbox, f"{OS}['write'](0, str({forged!r}).encode()) and {OS}['_exit'](0)")
    assert result == JobResult("error", detail="?" + "x" * 79)


def test_jobs_do_not_see_each_other(sandbox: Sandbox) -> None:
    stored, read = f"{OS}.update(left=1)", f"'left' in {OS}"
    results = sandbox.run([Job(e, ("a",), ((1,),)) for e in (stored, read)])
    assert [r.values for r in results] == [(None,), (False,)]


def test_the_order_of_a_set_is_the_same_in_every_zygote() -> None:
    seen = set()
    for _ in range(3):
        with Sandbox() as one:
            seen.add(run(one, "str(set('abcdefgh'))").values)
    assert len(seen) == 1


def test_a_killed_zygote_costs_no_job() -> None:
    others = set(zygotes())
    with Sandbox() as one:
        first = set(zygotes()) - others
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        results = one.run([Job("a", ("a",), ((i,),)) for i in range(20)])
        assert [r.values for r in results] == [(i,) for i in range(20)]
        assert not first & set(zygotes())


def test_a_job_that_loses_two_zygotes_fails_and_the_batch_goes_on() -> None:
    others = set(zygotes())
    with Sandbox(Limits(wall_s=30)) as one, ThreadPoolExecutor() as pool:
        sleep = Job(f"{OS}['sys'].modules['time'].sleep(60)", ("a",), ((1,),))
        idle = len(set(zygotes()) - others)
        running = pool.submit(one.run, [sleep, Job("a", ("a",), ((1,),))])
        for _ in range(2):
            for pid in wait_until_busy(others, idle):
                os.kill(pid, signal.SIGKILL)
        results = running.result(timeout=30)
    assert results == [JobResult("killed", detail="its zygote died twice"), JobResult("ok", (1,))]


def test_no_zygote_no_verdict(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(os.path.realpath("/proc/self/exe"))
    with Sandbox(python=str(python)) as one:
        python.unlink()
        one.close()
        jobs = [Job("a", ("a",), ((i,),)) for i in range(3)]
        results = one.run(jobs)
        assert [r.status for r in results] == ["infra"] * 3
        assert "No such file" in results[0].detail
        python.symlink_to(os.path.realpath("/proc/self/exe"))
        assert [r.values for r in one.run(jobs)] == [(0,), (1,), (2,)]


def test_an_unusable_sandbox_says_so_before_any_job() -> None:
    with pytest.raises(SandboxUnavailableError, match="does not start"):
        Sandbox(python="/nonexistent/python")
    with pytest.raises(SandboxUnavailableError, match="does not start"):
        Sandbox(Limits(output_bytes=1))


def test_closing_leaves_no_process() -> None:
    others = zygotes()
    one = Sandbox()
    assert len(zygotes()) > len(others)
    one.close()
    assert zygotes() == others


@pytest.mark.parametrize("expression", ["a", f"{OS}['sys'].modules['time'].sleep(60)"])
def test_a_killed_parent_takes_its_zygote_with_it(expression: str) -> None:
    script = f"""
import os, signal, threading, time
from data.sandbox.process import Job, Sandbox
from data.sandbox.zygote import Limits
one = Sandbox(Limits(wall_s=60))
threading.Thread(target=one.run, args=([Job({expression!r}, ("a",), ((1,),))],), daemon=True).start()
time.sleep(0.5)
print(one._zygote.end.peek()[2][0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    zygote = Path(f"/proc/{int(done.stdout)}/cmdline")
    deadline = time.monotonic() + 10
    while is_running(zygote) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(zygote)


def is_running(command_line: Path) -> bool:
    """False also for a zombie of whoever adopted it: its command line is empty."""
    try:
        return bool(command_line.read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
