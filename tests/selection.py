"""Choose which cases run: those of `make test`, all, or a quarter of the exhaustive ones.

Note [Turns]
Running every case takes too long for each change. So the cases marked ``exhaustive`` are divided into four
quarters by their names, and a CI run takes one quarter. The number of commits modulo four chooses it, so the
next commits run the others. The same number chooses among the cases of a function marked ``sampled``: `make
test` runs some of them, others at the next commit, and those that it leaves out count as exhaustive.

A case marked ``rotated`` takes seconds of CPU, too much to run at each commit: `make test` runs it at the
turn of its name. At the three other turns it counts as exhaustive, but belongs to no quarter of theirs, as
its quarter has the same turn. So four CI runs in a row run every case, and none runs it twice.
"""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import EXHAUSTIVE_LIMIT_S, TEST_LIMIT_S

TURNS = 4
"""Into how many parts the exhaustive cases are divided."""


def current_turn() -> int:
    """Return the turn of the commit that is checked out; 0 outside of a git repository."""
    # a repository of another user, as in a container, counts as well
    command = ["git", "-c", "safe.directory=*", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return 0
    return int(done.stdout) % TURNS if done.returncode == 0 else 0


def turn_of(nodeid: str) -> int:
    """Return the turn in which an exhaustive case runs.

    A CRC, because ``hash()`` of a string differs between processes.
    """
    return zlib.crc32(nodeid.encode()) % TURNS


def sampled_positions(cases: int, count: int, turn: int) -> set[int]:
    """Return the positions of `count` of the cases, spread over all; turns differ where there are enough.

    >>> [sorted(sampled_positions(10, 2, turn)) for turn in range(4)]
    [[0, 5], [1, 6], [3, 8], [4, 9]]
    """
    count = min(count, cases)
    return {int((number + (turn + 0.5) / TURNS) * cases / count) for number in range(count)}


class Selection:
    """The plugin that marks, limits and deselects the collected cases."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._sample(items, config.getoption("--turn"))
        if not config.getoption("--no-rotation"):
            self._rotate(items, config.getoption("--turn"))
        for item in items:
            if not item.get_closest_marker("timeout"):
                exhaustive = item.get_closest_marker("exhaustive")
                item.add_marker(pytest.mark.timeout(EXHAUSTIVE_LIMIT_S if exhaustive else TEST_LIMIT_S))
        if config.getoption("--quarter"):
            self._keep_quarter(config, items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End the process where a test hangs outside of Python, which its own limit cannot interrupt."""
        mark = item.get_closest_marker("timeout")
        if mark is None or not mark.args:
            return (yield)
        faulthandler.dump_traceback_later(2 * mark.args[0], exit=True, file=sys.__stderr__ or 2)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _sample(self, items: list[pytest.Item], turn: int) -> None:
        """Mark as exhaustive what ``sampled`` does not leave to `make test` at this turn."""
        functions: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in functions.values():
            mark = cases[0].get_closest_marker("sampled")
            if mark is None or not mark.args:
                raise pytest.UsageError(f"{cases[0].nodeid}: sampled needs a count, as in sampled(1)")
            kept = sampled_positions(len(cases), mark.args[0], turn)
            for position, item in enumerate(cases):
                if position not in kept:
                    item.add_marker(pytest.mark.exhaustive)

    def _rotate(self, items: list[pytest.Item], turn: int) -> None:
        """Mark as exhaustive what is ``rotated`` and has another turn than this one."""
        for item in items:
            if item.get_closest_marker("rotated") and turn_of(item.nodeid) != turn:
                item.add_marker(pytest.mark.exhaustive)

    def _keep_quarter(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect all but this turn's quarter of the exhaustive cases."""
        turn = config.getoption("--turn")
        kept: list[pytest.Item] = []
        rest: list[pytest.Item] = []
        for item in items:
            chosen = item.get_closest_marker("exhaustive") and turn_of(item.nodeid) == turn
            (kept if chosen else rest).append(item)
        config.hook.pytest_deselected(items=rest)
        items[:] = kept


def add_options(parser: pytest.Parser) -> None:
    """Add the options that choose cases."""
    parser.addoption(
        "--turn",
        type=int,
        choices=range(TURNS),
        default=current_turn(),
        help=f"Choose the turn, 0 to {TURNS - 1}. [default: the number of commits modulo {TURNS}]",
    )
    parser.addoption(
        "--no-rotation", action="store_true", help="Treat the cases marked `rotated` like all others."
    )
    parser.addoption(
        "--quarter", action="store_true", help="Run this turn's quarter of the exhaustive cases alone."
    )
