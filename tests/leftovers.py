"""End the processes that a test has started, by a mark in their environment."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.limits import wait_until

MARK = "ZLAUNCH_TEST_MARK"
_KEPT = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Servers that later tests use as well."""


def newest_process() -> bytes:
    """Return the number of the machine's newest process or thread.

    Where it has not changed, nobody has started one. That is so for most unit tests, and a look at the
    processes of the machine takes longer than such a test.
    """
    return Path("/proc/loadavg").read_bytes().split()[-1]


@contextmanager
def ended_afterwards() -> Iterator[Callable[[], bool]]:
    """End everything that is started inside, directly or not, when the block is left.

    Gives a function that tells whether anything may have been started so far.
    """
    mark, outer = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    before = newest_process()
    try:
        yield lambda: newest_process() != before
    finally:
        if outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = outer
        if newest_process() != before:
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
