"""A plugin of pytest for ``deepspeed_tests``: chooses cases and records how each ends. Imports no zlaunch.

Environment: OUTCOMES is the file that it adds to, a line of JSON for each case. FINISHED is a file that it
makes when all cases have an outcome. CASES is how many cases of each test function run, or ONLY a file with
the names of the cases that run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_left: set[str] = set()
"""Holds the chosen cases that have not begun."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases that are asked for, and of those the ones that have no outcome yet."""
    done = {entry["name"] for entry in _read(Path(os.environ["OUTCOMES"]))}
    if only := os.environ.get("ONLY"):
        names = set(Path(only).read_text().splitlines())
        chosen = [item for item in items if item.nodeid in names]
    else:
        chosen = _first_cases(items, int(os.environ["CASES"]))
    items[:] = [item for item in chosen if item.nodeid not in done]
    _left.update(item.nodeid for item in items)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down that a case has begun, so that one that ends the process is not begun again."""
    _left.discard(nodeid)
    _write(name=nodeid, outcome="ended the process", said="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a phase of a case ended: of several lines for a case the last counts."""
    if report.when == "call" or not report.passed:
        _write(name=report.nodeid, outcome=report.outcome, said=report.longreprtext[-4000:])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down that a file cannot be imported."""
    if report.failed:
        _write(name=report.nodeid, outcome="import failed", said=report.longreprtext[-4000:])


def pytest_sessionfinish() -> None:
    """Tell whether this process has run all that it was asked for."""
    if not _left:
        Path(os.environ["FINISHED"]).touch()


def _first_cases(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    seen: Counter[str] = Counter()
    chosen = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        if seen[function] <= count:
            chosen.append(item)
    return chosen


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(**entry: str) -> None:
    with Path(os.environ["OUTCOMES"]).open("a") as file:
        file.write(json.dumps(entry) + "\n")
