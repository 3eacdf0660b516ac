"""Run one attempt at a queued run, in a process that the queue's daemon starts (`zlaunch/cli/queued.py`).

The process depends on no daemon: it writes what becomes of the attempt into the attempt's files.

Note [Signals of a queued run]
The daemon signals an attempt from the moment that its `begun` is there: a time limit or a cancellation may
fall into the launcher's start. So this process handles signals before it writes `begun`, and until it has
written `ended`; in between, run_job handles them. Killed by a signal's default action, the launcher could
write no end, and the daemon would take it for one that somebody has killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import zlaunch as zlaunch_package
from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import Attempt, ensure_daemon
from zlaunch.queue.start_request import StartRequest
from zlaunch.supervisor import run_folder
from zlaunch.system.processes import signal_name

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run before it has begun. SIGUSR1 asks for room, and there is nothing to save yet."""


class _Stopped(BaseException):
    """Carries a signal that came while no run handled it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def run_attempt(text: str, arguments: Sequence[str], zlaunch: Callable[[list[str]], int]) -> int:
    """Launch, note the end, and have a daemon see it, which may have to be started. Return the exit code.

    Args:
        text: The daemon's request (`zlaunch/queue/start_request.py`).
        arguments: A command line of zlaunch.
        zlaunch: Runs a command line and returns its exit code.
    """
    try:
        request = StartRequest.read(text)
    except LaunchError as error:
        print(f"zlaunch: error: {error}", file=sys.stderr)
        return 2
    os.set_inheritable(request.lock, False)
    folder = Path(request.folder)
    attempt = Attempt(folder, request.job, request.attempt)
    try:
        _handle_signals()
        try:
            attempt.begin()
        except OSError as error:
            print(f"zlaunch: error: the queue's folder {folder}: {error.strerror}", file=sys.stderr)
            return 1
        _become_as_submitted(request)
        sys.argv[1:] = arguments  # as it is recorded
        code = zlaunch(["--run_id", request.run_id, "--first_attempt", str(request.attempt), *arguments])
        _ignore_signals()
    except _Stopped as stopped:
        _ignore_signals()
        code = _code_of(stopped, arguments)
    try:
        attempt.end(run_folder.own_end(arguments[arguments.index("--run_dir") + 1], code))
    except OSError as error:  # the daemon that has started this process sees its exit code
        print(f"zlaunch: warning: the queue's folder {folder}: {error.strerror}", file=sys.stderr)
    os.close(request.lock)
    try:
        ensure_daemon(folder)
    except LaunchError as error:
        print(f"zlaunch: warning: {error}", file=sys.stderr)
    return code


def _become_as_submitted(request: StartRequest) -> None:
    """Restore the submitter's settings; say what differs from what was submitted."""
    own = str(Path(zlaunch_package.__file__).parent)
    if not request.version:
        text = "submitted with zlaunch 0.2.0 or older: it runs with the daemon's Python and settings"
        print(f"zlaunch: {text}", file=sys.stderr)
    elif (request.version, request.path) != (__version__, own):
        before = f"{request.version} in {request.path}"
        now = f"{__version__} in {own}"
        print(f"zlaunch: submitted with zlaunch {before}, runs with {now}", file=sys.stderr)
    if request.settings is not None and (missed := request.settings.restore()):
        print(f"zlaunch: warning: not as submitted: {'; '.join(missed)}", file=sys.stderr)


def _handle_signals() -> None:
    """Have signals raise _Stopped; SIGUSR2, which asks for stacks that are not there yet, does nothing."""

    def stop(signum: int, frame: object) -> None:
        _ignore_signals()  # a second one must not interrupt what the first one has begun
        raise _Stopped(signum)

    for signum in _ENDING:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(signum, stop)
    signal.signal(signal.SIGUSR2, lambda signum, frame: None)


def _ignore_signals() -> None:
    """Handlers, not SIG_IGN: an ignored signal would stay ignored in a daemon that is started from here."""
    for signum in (*_ENDING, signal.SIGUSR2):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame: None)


def _code_of(stopped: _Stopped, arguments: Sequence[str]) -> int:
    """Return the exit code of a launcher that a signal has stopped before the run, or right after its end."""
    run_dir = arguments[arguments.index("--run_dir") + 1]
    record = run_folder.read(run_dir)
    if record is not None and record.pid == os.getpid() and record.exit_code is not None:
        return int(record.exit_code)
    print(f"zlaunch: stopped by {signal_name(stopped.signum)} before the run began", file=sys.stderr)
    return 128 + stopped.signum
