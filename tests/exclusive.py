"""Let a test marked ``exclusive`` run while no other process of pytest-xdist runs one.

Note [Two locks]
There are two lock files, "room" and "gate". A test holds the room's lock, shared with others; an exclusive
test holds it alone. With that lock only, others could take the room again and again while an exclusive test
waits. So each test first locks the gate, and an exclusive test keeps it while it waits for the room to empty.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "exclusive_folder"


class ExclusiveFolder:
    """The plugin of the process that distributes tests: it makes the folder of the locks, and removes it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pytest-exclusive-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_FOLDER] = self._folder.name

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Exclusive:
    """The plugin of a process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder = Path(config.workerinput[_FOLDER])  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        kind = fcntl.LOCK_EX if item.get_closest_marker("exclusive") else fcntl.LOCK_SH
        # lockf, not flock: a process that the test forks would keep an flock after this process is killed
        with open(self.folder / "gate", "a+") as gate, open(self.folder / "room", "a+") as room:
            fcntl.lockf(gate, fcntl.LOCK_EX)
            fcntl.lockf(room, kind)
            fcntl.lockf(gate, fcntl.LOCK_UN)
            return (yield)
