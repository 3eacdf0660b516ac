"""Spread the tests over the processes of pytest-xdist (``pytest -n 2``), and end what each has started."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests import budget, devices, selection
from tests.exclusive import Exclusive, ExclusiveFolder
from tests.leftovers import ended_afterwards
from tests.needs import Needs

# Thousands of processes import the same sources: none should compile them again because of a variable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# OpenMP threads that wait in a loop take the cores from the processes beside them. libgomp reads this
# when torch is imported, which nothing above does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.dont_write_bytecode = False
# Without limits of time: a first example may pay for an import, a machine be busy.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
FAILED = pytest.StashKey[bool]()
"""Whether a test's own code has failed, for fixtures."""


WAITING = ("tests/cluster/", "tests/e2e/")
"""Tests of launches and clusters mostly wait: for processes to start, to end or to be missed."""


class _Scheduling(LoadScopeScheduling):
    """File by file; tests/cluster in one process, because there is one cluster.

    The first process runs the tests that wait, beside those that compute in the other processes. Whoever
    has none left of its kind helps with the other.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node is self.nodes[0]
        for scope in self.workqueue:
            if scope.startswith(WAITING) == waits:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        folder = "tests/cluster/"
        return folder if nodeid.startswith(folder) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    # In the order of the folders, not files with most cases first: tests of clusters and launchers are long
    # and wait much, so they run beside those that compute, and the short unit tests fill the end.
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


@pytest.fixture(autouse=True)
def _level_of_messages() -> Iterator[None]:
    """Restore the level of the runtime's messages, which commands and configs set for the whole process."""
    yield
    # importing it here would import torch for the launcher's tests
    log: Any = sys.modules.get("zlaunch.runtime.log")
    if log is not None:
        log._least = logging.INFO


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    with ended_afterwards() as is_started:
        yield
        if is_started():
            request.node.stash[budget.DETACHED] = budget.detached_cpu_seconds()


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
    parser.addoption("--cpu-file", metavar="FILE", help="Write the CPU seconds of every test to this file.")
    parser.addoption("--budget", action="store_true", help="Fail above the limits of tests/budget.py.")
    selection.add_options(parser)
    devices.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(budget.Recorder(config), "cpu-recorder")
    config.pluginmanager.register(selection.Selection(), "selection")
    config.pluginmanager.register(Needs(), "needs")
    config.pluginmanager.register(devices.HiddenGpus(config), "hidden-gpus")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Exclusive(config), "exclusive")
    else:
        config.pluginmanager.register(ExclusiveFolder(), "exclusive-folder")


def pytest_collection_finish() -> None:
    """Leave what the tests' imports have made out of every later garbage collection: it all stays."""
    gc.freeze()


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
