"""What a process does to itself: hygiene before secrets, logging, and going into the background."""

from __future__ import annotations

import ctypes
import json
import logging
import logging.handlers
import os
import resource
import stat
import sys
from collections.abc import Callable, Mapping

from encfsd.config import Limit, format_limit, number_of
from encfsd.errors import EncfsdError, Exit, LogFileRefused, NoPermission

_PR_SET_DUMPABLE = 4
_PR_SET_IO_FLUSHER = 57
_SYSLOG = "/dev/log"
_ULIMIT = {"NOFILE": "n", "MEMLOCK": "l", "CORE": "c", "AS": "v", "NPROC": "u"}  # letters of ulimit


def protect_secrets(core: Limit | None = (0, 0)) -> None:
    """Leave no core dump and let nobody of the same user look in; call before reading a secret.

    `core`: RLIMIT_CORE, None to leave it alone; whatever it is, the kernel dumps no such process.
    """
    if core is not None:
        resource.setrlimit(resource.RLIMIT_CORE, core)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def promise_to_flush() -> None:
    """Tell the kernel that it may need this thread to free memory; fails without privilege."""
    ctypes.CDLL(None).prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)


def set_limits(limits: Mapping[str, Limit]) -> None:
    """Set limits of this process and of what it starts; NoPermission names one that is refused."""
    for name, limit in limits.items():
        hard = resource.getrlimit(number_of(name))[1]
        try:
            resource.setrlimit(number_of(name), limit)
        except (ValueError, OSError):
            raise NoPermission(
                f"{name}={format_limit(limit)}",
                f"the hard limit of this process is {format_limit((hard, hard))}",
                f"ask for less, or raise that: 'ulimit -H{_ULIMIT[name]}', "
                f"or Limit{name}= in the unit",
            ) from None


# Logging


class _StderrFormatter(logging.Formatter):
    """Prefixes each line as messages of the command line are, and tells warnings from errors."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "encfsd: warning: " if record.levelno == logging.WARNING else "encfsd: "
        return prefix + super().format(record)


class _JournalFormatter(logging.Formatter):
    """Prefixes each line with its priority, as sd-daemon(3) describes."""

    def format(self, record: logging.LogRecord) -> str:
        priority = {"WARNING": 4, "ERROR": 3, "CRITICAL": 2}.get(record.levelname, 6)
        return f"<{priority}>{super().format(record)}"


def warn_on_stderr() -> None:
    """Print warnings, and nothing else: for commands, and for a mount before it has its log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_StderrFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def open_log(log_file: str) -> int:
    """Open a log file for appending, make it if need be, or raise LogFileRefused."""
    # Not to wait for whoever reads a FIFO: opening one that nobody reads fails then.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(log_file, flags, 0o600)
    except OSError as error:
        raise LogFileRefused(log_file, error.strerror or str(error)) from None
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise LogFileRefused(log_file, "a FIFO")
    return fd


def log_to(log_file: str | None, *, background: bool) -> bool:
    """Send log lines to `log_file`, else to the journal in the background, else to stderr.

    Says whether it is stderr. Of a daemon that is going into the background only warnings go there:
    it is the user's terminal.
    """
    handler: logging.Handler
    on_stderr = False
    level = logging.INFO
    formatter: logging.Formatter = _StderrFormatter()
    if log_file is not None:
        handler = logging.StreamHandler(os.fdopen(open_log(log_file), "w"))
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    elif background and os.path.exists(_SYSLOG):
        handler = logging.handlers.SysLogHandler(
            _SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON
        )
        formatter = logging.Formatter("encfsd[%(process)d]: %(message)s")
    else:
        handler = logging.StreamHandler(sys.stderr)
        on_stderr = True
        if "JOURNAL_STREAM" in os.environ:
            formatter = _JournalFormatter("%(message)s")
        elif background:
            level = logging.WARNING
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    return on_stderr


# Background

Report = Callable[[EncfsdError | None], None]


def report_nothing(error: EncfsdError | None) -> None:
    """Be the report of a process in the foreground."""


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        remedy = "allow this user more processes: NPROC, 'ulimit -u' or LimitNPROC= in the unit"
        raise NoPermission("daemon", error.strerror or str(error), remedy) from None


def go_to_background() -> Report | int:
    """Fork a daemon; call before any thread exists and before the volume is unlocked.

    In the daemon, return a function to call with None when the mount is usable, or with the error
    that prevents it; later calls do nothing. In the parent, wait for the call, print an error,
    return an exit code.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = _fork()
    if child != 0:
        os.close(write_end)
        os.waitpid(child, 0)
        return _wait_for_report(read_end)
    os.close(read_end)
    os.setsid()
    if _fork() != 0:
        os._exit(0)
    os.chdir("/")

    reported = False

    def report(error: EncfsdError | None) -> None:
        nonlocal reported
        if reported:
            return
        reported = True
        outcome = {} if error is None else {"code": error.exit_code, "message": str(error)}
        os.write(write_end, json.dumps(outcome).encode())
        os.close(write_end)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)

    return report


def _wait_for_report(read_end: int) -> int:
    with os.fdopen(read_end, "rb") as pipe:
        raw = pipe.read()
    if not raw:
        print("encfsd: the daemon ended unexpectedly; see the log", file=sys.stderr)  # noqa: T201
        return Exit.INTERNAL
    outcome = json.loads(raw)
    if outcome:
        print(f"encfsd: {outcome['message']}", file=sys.stderr)  # noqa: T201
    return int(outcome.get("code", 0))
