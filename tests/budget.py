"""Record the CPU seconds of every test, and hold `make test` to a budget of them.

Note [What counts as a test's CPU time]
CPU seconds, not wall time: a test that only waits costs nothing, and wall time depends on the machine's load.
A test pays for its own process and for everything that it started: ranks, launchers, agents, daemons.
The kernel adds a process's time to its parent when the parent reaps it, so the sum over all living
descendants of "own time and that of reaped children" loses nothing while parents reap. Ranks are children
of multiprocessing's fork server, which is a descendant and reaps them. A detached process is no descendant;
it counts as long as it lives, by the mark of tests/leftovers.py in its environment. One that has
ended by itself is not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.leftovers import MARK, marked, possible_starts
from tests.limits import SLOWER

CASE_S, ROOM_S, TOTAL_S = 10.0, 60.0, 600.0
"""Limits of `make test` in CPU seconds on the machine that REFERENCE_S was measured on. They grow on a slower
one, by what `_speed_probe` takes there, and by ZLAUNCH_TEST_SLOWER on a busy one, where ranks wait actively.
"""
FAILS_FROM = 2.0
"""Times a limit that fail the tests; less is only printed. The same test takes up to 1.5 times as long on a
machine of the same kind (caches, memory, neighbours), which the probe does not see.
"""
REFERENCE_S = 0.11
"""CPU seconds of `_speed_probe` on the reference machine."""
DEAREST = 50
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_START = pytest.StashKey[float]()
DETACHED = pytest.StashKey[float]()
"""CPU seconds of a test's detached processes, taken before they are killed."""
_PROPERTY = "cpu_s"


def room_of(nodeid: str) -> str:
    """Return the room of a test: its folder, or its file where a folder has no rooms below it.

    >>> room_of("tests/runtime/zero/test_reduce.py::test_sums")
    'tests/runtime/zero'
    >>> room_of("tests/e2e/test_queue.py::test_one")
    'tests/e2e/test_queue.py'
    """
    path = nodeid.partition("::")[0].split("/")
    return "/".join(path[:3])


def _tree() -> tuple[dict[int, float], dict[int, list[int]]]:
    """Return the CPU seconds of each process with its reaped children, and each one's living children."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children[int(fields[1])].append(int(name))
        used[int(name)] = sum(map(int, fields[11:15])) * _TICK_S
    return used, children


def _below(roots: Iterable[int], children: dict[int, list[int]]) -> set[int]:
    """Return the processes and all their living descendants."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children[pid]
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its reaped children and of all living descendants."""
    used, children = _tree()
    return sum(used.get(pid, 0.0) for pid in _below([os.getpid()], children))


def detached_cpu_seconds() -> float:
    """Return the CPU seconds of what the running test has started and detached from itself."""
    used, children = _tree()
    detached = _below(marked(os.environ[MARK]), children) - _below([os.getpid()], children)
    return sum(used.get(pid, 0.0) for pid in detached)


def _speed_probe() -> float:
    """Return the CPU seconds of a fixed piece of pure Python."""
    start = time.process_time()
    total = 0
    for number in range(5_000_000):
        total += number & 7
    return time.process_time() - start


class Recorder:
    """Run beside the tests: measure in the processes that run them, sum up in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file: str | None = config.getoption("--cpu-file")
        self.held: bool = config.getoption("--budget")
        self.cases: dict[str, float] = {}
        self.outside: dict[str, float] = {}
        self.too_much: list[str] = []
        self._before_tests = 0.0
        # as last measured: CPU seconds of all processes, CPU seconds of this one, and the processes started
        self._total = 0.0
        self._own = 0.0
        self._starts = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the ranks' fork server first: its imports would count as the first test's."""
        workers = sys.modules.get("tests.runtime.workers")
        if workers and any(hasattr(getattr(item, "module", None), "run_workers") for item in session.items):
            workers.start_fork_server()
        self._before_tests = cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        # nothing that earlier tests have left works now, or the next test that starts a process pays for it
        item.stash[_START] = self._used(is_started=self._total == 0)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._starts = possible_starts()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "teardown":
            is_started = possible_starts() != self._starts
            used = self._used(is_started=is_started) - item.stash[_START] + item.stash.get(DETACHED, 0.0)
            used = max(0.0, used)  # a process that is detached takes its time out of the tree
            report.user_properties.append((_PROPERTY, used))
        return report

    def _used(self, *, is_started: bool) -> float:
        """Return what `cpu_seconds` does; without a look at all processes where none has been started."""
        own = time.process_time()
        self._total = cpu_seconds() if is_started else self._total + own - self._own
        self._own = own
        return self._total

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                assert isinstance(value, float)
                self.cases[report.nodeid] = value

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what this process has used before its first test, for imports and collection."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            # what it was before the tests; more where something used the CPU between or after them
            output["cpu_outside_s"] = max(self._before_tests, cpu_seconds() - sum(self.cases.values()))
            return
        self.outside["pytest"] = time.process_time() if self.outside else self._before_tests
        self.too_much, fails = self.over() if self.held else ([], False)
        if fails:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.outside[node.gateway.id] = getattr(node, "workeroutput", {}).get("cpu_outside_s", 0.0)

    # -- what the process that reports makes of it

    def rooms(self) -> dict[str, float]:
        """Return the CPU seconds of each room."""
        found: dict[str, float] = defaultdict(float)
        for nodeid, used in self.cases.items():
            found[room_of(nodeid)] += used
        return dict(found)

    def total(self) -> float:
        """Return the CPU seconds of everything, imports and collection included."""
        return sum(self.cases.values()) + sum(self.outside.values())

    def over(self) -> tuple[list[str], bool]:
        """Return a line for each limit that is exceeded, and whether the tests fail of it."""
        slower = max(1.0, SLOWER, min(_speed_probe() for _ in range(3)) / REFERENCE_S)
        lines = []
        fails = False
        for what, used, limit in (
            *((nodeid, used, CASE_S) for nodeid, used in self.cases.items()),
            *((room, used, ROOM_S) for room, used in self.rooms().items()),
            ("all tests", self.total(), TOTAL_S),
        ):
            if used > limit * slower:
                scaled = f", {slower:.2f} times as much on this machine" if slower > 1 else ""
                lines.append(f"{what}: {used:.1f} CPU s; the budget has {limit:.0f}{scaled}")
                fails = fails or used > limit * slower * FAILS_FROM
        return lines, fails

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.cases or hasattr(self.config, "workerinput"):
            return
        if self.file:
            record = {
                "total_s": round(self.total(), 1),
                "outside_s": {name: round(used, 1) for name, used in self.outside.items()},
                "rooms_s": _sorted(self.rooms().items()),
                "cases_s": _sorted(self.cases.items()),
            }
            Path(self.file).write_text(json.dumps(record, indent=1) + "\n")
            terminalreporter.section(f"CPU seconds: the {DEAREST} dearest tests (all in {self.file})")
            for nodeid, used in list(record["cases_s"].items())[:DEAREST]:  # type: ignore[attr-defined]
                terminalreporter.write_line(f"{used:8.2f} {nodeid}")
        outside = sum(self.outside.values())
        terminalreporter.write_line(
            f"{self.total():.0f} CPU s: {self.total() - outside:.0f} in {len(self.cases)} tests, "
            f"{outside:.0f} for imports and collection in {len(self.outside)} processes"
        )
        if self.too_much:
            terminalreporter.section("over the budget of CPU time (tests/budget.py)", red=True)
            terminalreporter.write_line(
                "Shorten these tests, or mark cases `exhaustive`. The tests fail from "
                f"{FAILS_FROM:g} times a limit on. Waiting ranks use more CPU time on a busy machine: "
                "ZLAUNCH_TEST_SLOWER=2 doubles the budget and all limits."
            )
            for line in self.too_much:
                terminalreporter.write_line(line)


def _sorted(used: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest first."""
    return {name: round(value, 2) for name, value in sorted(used, key=lambda pair: -pair[1])}
