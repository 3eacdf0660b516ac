"""Test what tests/selection.py, budget.py and exclusive.py make of a run, in runs of pytest of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import CASE_S, room_of
from tests.selection import TURNS, sampled_positions

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[3]


def run_pytest(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugins of tests/conftest.py on one file."""
    (folder / "test_it.py").write_text("import os, time\nimport pytest\n" + source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-v",
        *options,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=folder, env={**env, "PYTHONPATH": f"{ROOT}:{folder}"}, capture_output=True, text=True
    )


def passed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the names of the cases that passed."""
    return re.findall(r"^(?:\S+ )*?test_it.py::(\S+) PASSED", done.stdout, re.MULTILINE)


@given(st.integers(1, 300), st.integers(1, 5))
def test_each_turn_samples_as_many_cases_as_the_mark_says(cases: int, count: int) -> None:
    taken = [sampled_positions(cases, count, turn) for turn in range(TURNS)]
    assert {len(positions) for positions in taken} == {min(cases, count)}
    assert set().union(*taken) <= set(range(cases))
    if cases >= TURNS * count:
        assert len(set().union(*taken)) == TURNS * count


EXHAUSTIVE = """
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(20))
def test_whole(number): pass

@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(12))
def test_sampled(number): pass

@pytest.mark.rotated
@pytest.mark.parametrize("number", range(12))
def test_rotated(number): pass

@pytest.mark.rotated
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(12))
def test_both(number): pass

def test_always(): pass
"""


class Finish:
    """A plugin that keeps the cases that would run."""

    items: Sequence[pytest.Item] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def collect(pytester: pytest.Pytester, *options: str) -> dict[str, pytest.Item]:
    """Return the cases that would run, by their names."""
    finish = Finish()
    pytester.inline_run("--collect-only", "-qq", "-p", "tests.conftest", *options, plugins=[finish])
    return {item.name: item for item in finish.items}


def test_the_quarters_of_four_turns_are_all_exhaustive_cases(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n" + EXHAUSTIVE)
    short: Counter[str] = Counter()
    quarters: Counter[str] = Counter()
    for turn in range(TURNS):
        short.update(list(collect(pytester, f"--turn={turn}", "-m", "not exhaustive")))
        quarters.update(list(collect(pytester, f"--turn={turn}", "--quarter")))
    whole = {f"test_whole[{number}]" for number in range(20)}
    sampled = {f"test_sampled[{number}]" for number in range(12)}
    assert short["test_always"] == TURNS and "test_always" not in quarters
    assert quarters.keys() >= whole and short.keys() & whole == set()
    rotated = {f"{name}[{number}]" for name in ("test_rotated", "test_both") for number in range(12)}
    assert quarters.keys() | short.keys() == {*whole, *sampled, *rotated, "test_always"}
    assert set(quarters.values()) == {1}, "no case runs in two quarters"
    assert len(short.keys() & sampled) == TURNS
    assert all(short[name] + quarters[name] == 1 for name in rotated)
    assert {name for name in rotated if short[name]} >= {f"test_rotated[{number}]" for number in range(12)}
    unrotated = collect(pytester, "--no-rotation", "-m", "not exhaustive")
    assert sum(name.startswith("test_rotated") for name in unrotated) == 12


@pytest.mark.exhaustive
def test_the_record_has_the_time_of_what_a_test_started_and_what_is_too_much_fails_the_run(
    tmp_path: Path,
) -> None:
    """The limits are lowered here: burning ten seconds would be a test above the budget."""
    lowered = "import tests.budget\ntests.budget.CASE_S = 0.3\ntests.budget.REFERENCE_S = 1e9\n"
    (tmp_path / "low.py").write_text(lowered)  # a slow machine must not raise the limit here
    source = """
import subprocess, sys
BURN = "import time\\nwhile time.process_time() < {}: pass"
def test_child(): subprocess.run([sys.executable, "-c", BURN.format(0.7)], check=True)
def test_detached():
    script = BURN.format(0.7) + "\\nopen('done', 'w')\\ntime.sleep(99)"
    subprocess.run(["setsid", "--fork", sys.executable, "-c", script])
    while not os.path.exists("done"): time.sleep(0.05)
def test_idle(): time.sleep(0.5)
"""
    done = run_pytest(tmp_path, source, "-p", "low", "--budget", "--cpu-file=cpu.json", "-n", "1")
    assert done.returncode == 1 and "= 3 passed in" in done.stdout, done.stdout
    used = cpu_of(tmp_path)
    assert used["test_child"] > 0.6 and used["test_detached"] > 0.6
    assert used["test_idle"] < 0.45
    assert list(used)[-1] == "test_idle", "the dearest first"
    for name in ("test_child", "test_detached"):
        assert re.search(rf"test_it.py::{name}: [\d.]+ CPU s; the budget has 0", done.stdout)
    assert "test_idle:" not in done.stdout


def cpu_of(folder: Path) -> dict[str, float]:
    """Return the recorded CPU seconds of each case."""
    cases = json.loads((folder / "cpu.json").read_text())["cases_s"]
    return {name.partition("::")[2]: seconds for name, seconds in cases.items()}


def test_rooms() -> None:
    assert CASE_S > 0
    assert room_of("tests/runtime/zero/test_reduce.py::test_sums[a/b]") == "tests/runtime/zero"
    assert room_of("tests/e2e/test_queue.py::test_one") == "tests/e2e/test_queue.py"


@pytest.mark.exhaustive
def test_an_exclusive_test_runs_alone(tmp_path: Path) -> None:
    """Every test writes down when it began and ended; no other lies across the exclusive one's time."""
    body = """
def note(name):
    begin = time.monotonic()
    time.sleep(0.2)
    with open("times", "a") as file: file.write(f"{name} {begin} {time.monotonic()}\\n")
"""
    tests = "\n".join(f"def test_{number}(): note('shared')" for number in range(5))
    alone = "\n@pytest.mark.exclusive\ndef test_alone(): note('alone')\n"
    (tmp_path / "test_other.py").write_text("import time, pytest\n" + body + tests)
    done = run_pytest(tmp_path, body + tests.replace("test_", "test_a", 3) + alone, "-n", "2")
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    times = [(name, float(begin), float(end)) for name, begin, end in lines]
    assert len(times) == 11
    ((_, begin, end),) = [each for each in times if each[0] == "alone"]
    assert not [each for each in times if each[0] == "shared" and each[1] < end and each[2] > begin]


def test_tests_that_wait_run_beside_those_that_compute(tmp_path: Path) -> None:
    for name in ("cluster/test_a", "e2e/test_b", "runtime/test_a", "unit/test_b"):
        path = tmp_path / f"tests/{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text("import os\ndef test_it(): print(os.environ['PYTEST_XDIST_WORKER'], __file__)\n")
    done = run_pytest(tmp_path, "", "-n", "2", "-rP", "--import-mode=importlib")
    assert done.returncode == 0, done.stdout
    worker_of = {
        folder: worker for worker, folder in re.findall(r"^(gw\d) .*/tests/(\w+)/", done.stdout, re.MULTILINE)
    }
    assert worker_of["cluster"] == worker_of["e2e"] != worker_of["runtime"] == worker_of["unit"]


def test_a_test_that_hangs_fails_with_its_stack(tmp_path: Path) -> None:
    source = """
@pytest.mark.timeout(1)
def test_hangs(): wait_for_ever()
def wait_for_ever(): time.sleep(3600)
def test_next(): pass
"""
    done = run_pytest(tmp_path, source, "--cpu-file=cpu.json")
    assert done.returncode == 1 and "wait_for_ever" in done.stdout
    assert passed(done) == ["test_next"]
    assert set(cpu_of(tmp_path)) == {"test_hangs", "test_next"}, "also where one process does all"


def test_every_test_has_a_limit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n" + EXHAUSTIVE)
    marks = {name: item.get_closest_marker("timeout") for name, item in collect(pytester).items()}
    assert all(mark and mark.args[0] > 0 for mark in marks.values())
    assert marks["test_whole[0]"].args > marks["test_always"].args  # type: ignore[union-attr]
