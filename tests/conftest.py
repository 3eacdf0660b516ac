"""Spread the tests over the processes of pytest-xdist (``pytest -n 2``), and end what each has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.leftovers import ended_afterwards

# Without limits of time: a first example may pay for an import, a machine be busy.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
_GROUPS = {"tests/cluster/": "cluster", "tests/runtime/": "ranks", "tests/matrix/": "ranks"}
"""Folders whose tests run one after the other: there is one cluster; and ranks that wait for each other in
shared memory should have a core each.
"""
FAILED = pytest.StashKey[bool]()
"""Whether a test's own code has failed, for fixtures."""


class _Scheduling(LoadScopeScheduling):
    """One process for each group of folders, the other tests file by file."""

    def _split_scope(self, nodeid: str) -> str:
        names = [name for name in _GROUPS if nodeid.startswith(name)]
        if self.config.getoption("--spread"):
            names = [name for name in names if _GROUPS[name] != "ranks"]
        group = _GROUPS[names[0]] if names else None
        return group or nodeid.partition("::")[0]


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with ended_afterwards():
        yield


# -- a skipped test is a failed one in CI, but for those of tests/gpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="Fail where a test outside tests/gpu is skipped."
    )

    parser.addoption(
        "--every-case",
        action="store_true",
        help="Train each feature of tests/matrix under all stages; measure the memory of every model.",
    )
    parser.addoption(
        "--spread", action="store_true", help="Run files of tests/runtime beside each other: no core idles."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave `count` cases of a function marked ``sampled(count)`` to ``make test``, spread over all; mark the
    others as exhaustive.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("sampled")
        assert mark is not None
        count = min(mark.args[0], len(found))
        kept = {int((number + 0.5) * len(found) / count) for number in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.exhaustive)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is ended before its end has then said what it found."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", file=sys.__stderr__, flush=True)


def _refuse_skip(report: Any, config: pytest.Config) -> None:
    expected = report.nodeid.startswith("tests/gpu/") or hasattr(report, "wasxfail")
    if report.skipped and config.getoption("--no-skips") and not expected:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{reason}\n(--no-skips: nothing may be skipped)"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    _refuse_skip(report, collector.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    _refuse_skip(report, item.config)
    return report
