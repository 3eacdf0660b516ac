"""End the processes that a test has started, by a mark in their environment."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.limits import wait_until

MARK = "ZLAUNCH_TEST_MARK"
_KEPT = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Servers that later tests use as well."""


_STARTING = frozenset(
    ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.connect")
)
"""Python's audit events of what starts a process. Servers start one for whoever connects to them:
multiprocessing's fork server starts the ranks. multiprocessing's "spawn" has no event; tests leave it to
processes that they start."""
_starts = 0


def _count(event: str, args: tuple[object, ...]) -> None:
    global _starts
    if event in _STARTING:
        _starts += 1


sys.addaudithook(_count)


def possible_starts() -> int:
    """Return how often this process may have started another.

    Where the number has not changed, a test has started nothing. That is so for most unit tests, and a look
    at the processes of the machine takes longer than such a test.
    """
    return _starts


@contextmanager
def ended_afterwards() -> Iterator[Callable[[], bool]]:
    """End everything that is started inside, directly or not, when the block is left.

    Gives a function that tells whether anything may have been started so far. Where nothing has, nothing is
    looked for.
    """
    mark = uuid.uuid4().hex
    outer = os.environ.get(MARK)
    os.environ[MARK] = mark
    before = possible_starts()
    try:
        yield lambda: possible_starts() != before
    finally:
        if outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = outer
        if possible_starts() != before:
            wait_until(lambda: not _kill(mark), "processes of the test killed")


def unmarked() -> dict[str, str]:
    """The environment for what is to outlive the test."""
    return {key: value for key, value in os.environ.items() if key != MARK}


def marked(mark: str) -> list[int]:
    """Find all processes with the mark, servers that later tests use as well aside."""
    found = []
    entry = f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if entry not in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                continue
            if any(word in Path("/proc", name, "cmdline").read_bytes() for word in _KEPT):
                continue
        except OSError:
            continue
        found.append(int(name))
    return found


def _kill(mark: str) -> list[int]:
    """Kill all living processes with the mark; return their numbers."""
    found = []
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
        found.append(pid)
    return found
