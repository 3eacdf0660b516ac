"""Choose which cases run: those of `make test`, all, or a quarter of the exhaustive ones.

Note [Turns]
Going through every case takes longer than a change may wait for. So cases marked as exhaustive are divided
into four quarters by their names, and a delivery runs one quarter. Which one follows from the number of
commits, so nobody chooses it, and the next commits run the others. Cases of functions marked ``sampled``
take turns by the same number: which of them `make test` runs changes from commit to commit, and the
others are exhaustive.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest

from tests.limits import EXHAUSTIVE_LIMIT_S, TEST_LIMIT_S

TURNS = 4
"""Into how many parts the exhaustive cases are divided."""


def current_turn() -> int:
    """Return the turn of the commit that is checked out; 0 outside of a git repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
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
    """Return the positions of `count` of the cases, spread over all; each turn has other ones if it can.

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
        for item in items:
            if not item.get_closest_marker("timeout"):
                exhaustive = item.get_closest_marker("exhaustive")
                item.add_marker(pytest.mark.timeout(EXHAUSTIVE_LIMIT_S if exhaustive else TEST_LIMIT_S))
        if config.getoption("--quarter"):
            self._keep_quarter(config, items)

    def _sample(self, items: list[pytest.Item], turn: int) -> None:
        """Mark as exhaustive what ``sampled`` does not leave to `make test` at this turn."""
        functions: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in functions.values():
            mark = cases[0].get_closest_marker("sampled")
            assert mark is not None
            kept = sampled_positions(len(cases), mark.args[0], turn)
            for position, item in enumerate(cases):
                if position not in kept:
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
        help=f"Which of {TURNS} turns it is. [default: the number of commits modulo {TURNS}]",
    )
    parser.addoption(
        "--quarter", action="store_true", help="Run this turn's quarter of the exhaustive cases alone."
    )
