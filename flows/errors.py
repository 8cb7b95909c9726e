"""The ways in which a command ends badly: one line for the user, one exit code each. ValueError is the user's (2)."""

import errno

STALE = 1
USER_ERROR = 2
INTERRUPTED = 130
UNEXPECTED = 70


class FlowError(Exception):
    """A named failure of the control plane; its text says what happened, where, and what to do."""

    exit_code = UNEXPECTED


class WorkspaceHeldError(FlowError):
    """Another run holds the workspace, or took it over."""

    exit_code = 3


class StageFailedError(FlowError):
    """A stage function raised, or its process died."""

    exit_code = 4


class DiskFullError(FlowError):
    """A write found no room."""

    exit_code = 5


class OrchestratorError(FlowError):
    """The Prefect server did not start or went away."""

    exit_code = 6


class InterruptedRunError(FlowError):
    """Ctrl-C or SIGTERM."""

    exit_code = INTERRUPTED


def is_disk_full(error: BaseException) -> bool:
    """No space, over quota, or over the file size limit; also when an error wraps such a one."""
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    words = ("database or disk is full", "No space left on device")  # what SQLite and native libraries say
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in full) or any(text in str(seen) for text in words):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
