"""Run DeepSpeed's own unit tests with the real package, and those that pass with zlaunch's alias.

    python -m tests.compat.projects.deepspeed_tests TESTS OUTCOMES --deepspeed FOLDER [--only TEXT]

TESTS is the folder ``tests`` of a clone of DeepSpeed. The ranks of its tests use the CPU. Outcomes go to the
folder OUTCOMES as they come, and what is there is not run again. Each test file has its own process, because
a test that hangs ends pytest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[3]
ALIAS = ROOT / "zlaunch" / "compat" / "deepspeed" / "path"
# Seconds for a test, after which the tests end themselves. If a rank's error cannot be pickled, as with
# pytest.raises, the tests wait for ever: without an outcome for longer, we kill them.
TEST_LIMIT_S = 60
STALL_S = 120
MOST_PROCESSES = 20
# Kernels, inference and the compiler passes of DeepSpeed: most need a GPU, and zlaunch has no counterpart.
LEFT_OUT = ("inference", "hybrid_engine", "ops/transformer", "deepspeed4science", "triton_ops", "compile/")


@click.command()
@click.argument("tests", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("outcomes", type=click.Path(file_okay=False, path_type=Path))
@click.option("--deepspeed", multiple=True, required=True, help="Folder with DeepSpeed or what it needs.")
@click.option("--only", default="", help="Run the files whose path contains this text.")
@click.option("--cases", default=1, help="How many cases of each test function run.")
@click.option("--jobs", default=2, help="How many files run at once.")
def main(tests: Path, outcomes: Path, deepspeed: tuple[str, ...], only: str, cases: int, jobs: int) -> None:
    """Run the tests with both, and print what passes with the real package alone."""
    tests = tests.resolve()
    outcomes = outcomes.resolve()
    files = [
        path.relative_to(tests)
        for path in sorted(tests.glob("unit/**/test_*.py"))
        if only in str(path) and not any(part in str(path.relative_to(tests)) for part in LEFT_OUT)
    ]
    # What DeepSpeed's tests themselves import, such as hjson.
    needed = [each for each in deepspeed if not Path(each, "deepspeed").exists()]
    for side in ("real", "alias"):
        (outcomes / side).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deepspeed-tests-") as folder, ThreadPoolExecutor(jobs) as pool:
        shutil.copy(Path(__file__).parent / "record_outcomes.py", folder)

        def run(file: Path) -> None:
            name = str(file).replace("/", ".")
            real = {"CASES": str(cases), "PYTHONPATH": ":".join((folder, *deepspeed))}
            _run_file(file, tests, outcomes / "real" / name, real)
            if passing := _passing(_read(outcomes / "real" / f"{name}.jsonl")):
                wanted = outcomes / "alias" / f"{name}.wanted"
                wanted.write_text("\n".join(passing))
                alias = {
                    "ONLY": str(wanted),
                    "PYTHONPATH": ":".join((folder, str(ALIAS), str(ROOT), *needed)),
                }
                _run_file(file, tests, outcomes / "alias" / name, alias)

        list(pool.map(run, files))
    _report(_read_all(outcomes / "real"), _read_all(outcomes / "alias"))


def _run_file(file: Path, tests: Path, out: Path, settings: dict[str, str]) -> None:
    """Run a file's tests until each has an outcome."""
    environment = {
        **os.environ,
        **settings,
        "OUTCOMES": f"{out}.jsonl",
        "FINISHED": f"{out}.finished",
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": str(TEST_LIMIT_S),
        # The ranks that DeepSpeed's CPU accelerator takes this machine to have room for.
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-p", "record_outcomes", str(file)]
    finished = Path(f"{out}.finished")
    # A process that a case has ended leaves the cases after it to the next.
    for _ in range(MOST_PROCESSES):
        if finished.exists():
            return
        print(f"{out.parent.name}: {file}", flush=True)
        with Path(f"{out}.log").open("a") as output:
            ran = subprocess.Popen(
                command,
                cwd=tests,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _wait(ran, Path(f"{out}.jsonl"))
            # Ranks that hang outlive pytest, in its session.
            subprocess.run(["pkill", "-9", "-s", str(ran.pid)], check=False)
            ran.wait()


def _wait(ran: subprocess.Popen[bytes], outcomes: Path) -> None:
    """Wait until a process ends, or has written no outcome for too long."""
    size = -1
    while True:
        try:
            ran.wait(STALL_S)
            return
        except subprocess.TimeoutExpired:
            before = size
            size = outcomes.stat().st_size if outcomes.exists() else 0
            if size == before:
                return


def _passing(entries: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, entry in entries.items() if entry["outcome"] == "passed"]


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return the last entry of each case."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def _read_all(folder: Path) -> dict[str, dict[str, str]]:
    return {name: entry for path in sorted(folder.glob("*.jsonl")) for name, entry in _read(path).items()}


def _report(real: dict[str, dict[str, str]], alias: dict[str, dict[str, str]]) -> None:
    """Print how the cases end with the alias that pass with DeepSpeed."""
    passing = _passing(real)
    counts: Counter[str] = Counter()
    for name in passing:
        entry = alias.get(name)
        if entry is None:
            # Its file could not be imported.
            entry = alias.get(name.partition("::")[0], {"outcome": "no outcome", "said": ""})
        counts[entry["outcome"]] += 1
        if entry["outcome"] != "passed":
            errors = [line for line in entry["said"].splitlines() if line.startswith("E  ")]
            print(f"{entry['outcome']}  {name}\n    {errors[-1][4:].strip() if errors else ''}")
    print(f"{len(passing)} pass with DeepSpeed; with the alias: {dict(counts)}")


if __name__ == "__main__":
    main()
