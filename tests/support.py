"""Run the runtime's tests with other versions of Python and torch than those it is developed with.

    python -m tests.support [--smoke] [--keep-going] [--torch-index URL]   # make test-support, test-smoke
    python -m tests.support --prepare   # install the combinations: CI does that beside the linters

Each combination has a virtual environment in .venv-support, which is made on the first call: two minutes and
5 GB each, where torch comes from PyPI with CUDA's libraries. It is kept, unless --remove is given.

What is run: tests/runtime and tests/unit, without those marked `exhaustive`. Left out are LEFT_OUT, a
combination's own rooms, tests/matrix, and the tests of the command and of the alias (tests/e2e,
tests/cluster, tests/compat), which run with the versions of constraints.txt alone. With --smoke it is SMOKE.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-support"
MARK = ".complete"
"""The file in a virtual environment that says what it was made of, once all is there."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WANTED = ("-e", ".[cpu,plot,hjson]", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
TORCHS_OWN = ("torch==", "sympy==", "setuptools==", "nvidia-")
"""Lines of constraints.txt that do not hold here: each version of torch wants its own version of these."""
TESTS = ("tests/runtime", "tests/unit")
LEFT_OUT = (
    "--ignore=tests/unit/cuda_ops/test_kernels_compile.py",  # needs NVRTC, by CuPy
    "--ignore=tests/unit/cuda_ops/test_kernels_ptxas.py",  # needs CUDA's assembler
    "--ignore=tests/unit/project/test_packaging.py",  # builds a wheel
    "--ignore=tests/unit/cuda_ops/test_kernels_math.py",  # tests C++
    "--ignore=tests/unit/monitor/test_monitor.py",  # needs the trackers' libraries
    "--ignore=tests/unit/config/test_fuzz.py",  # long, and no torch in it, as the next
    "--ignore=tests/unit/benchmarks",
    "--ignore=tests/unit/kubernetes",  # needs Kubeflow's models
    "--ignore=tests/unit/ui/test_command.py",  # needs the web server, as the next
    "--ignore=tests/unit/ui/test_pages.py",
    "--ignore=tests/unit/view/test_screen.py",  # needs pyte
    "--ignore=tests/unit/data/test_torchdata.py",
    "--deselect=tests/unit/data/test_marks.py::test_streams_of_hugging_face",
    # need bitsandbytes
    "--ignore=tests/runtime/checkpoint/test_bitsandbytes.py",
    "--deselect=tests/unit/cuda_ops/test_narrow_state.py::test_the_state_of_bitsandbytes",
    # need accelerate and the Hub's client
    "--deselect=tests/unit/cli/test_torchrun_flags.py::test_the_variables_of_fsdp_are_those_of_accelerates_launcher",
    "--deselect=tests/unit/cli/test_torchrun_flags.py::test_accelerates_options_of_fsdp_are_all_known",
    "--deselect=tests/unit/cli/test_estimate.py::test_a_name_that_the_hub_does_not_have",
    "--ignore=tests/runtime/deadlock/test_rank_mismatch.py",  # long
    # need transformers
    "--ignore=tests/runtime/tensor_parallel/test_families.py",
    "--ignore=tests/runtime/tensor_parallel/test_plans.py",
    "--ignore=tests/runtime/expert_parallel/test_families.py",
    "--ignore=tests/runtime/pipeline_parallel/test_families.py",
    "--ignore=tests/runtime/sequence_parallel/test_families.py",
    "--ignore=tests/runtime/sequence_parallel/test_tiles.py",
    "--ignore=tests/runtime/memory/test_estimate_axes.py",
    "--ignore=tests/runtime/test_same_batch.py",
    "--deselect=tests/runtime/monitor/test_router.py::test_a_hugging_face_model",
    "--deselect=tests/runtime/precision/test_buffers.py::test_rotary_frequencies_stay_in_fp32",
    "--deselect=tests/runtime/precision/test_autocast.py::test_stages_of_a_pipeline",
    "--deselect=tests/runtime/memory/test_estimate_measured.py::test_the_estimate_is_what_a_step_takes[llama-True]",
    "--deselect=tests/runtime/memory/test_estimate_measured.py::test_what_cannot_be_estimated_is_refused",
    "--deselect=tests/runtime/offload/test_offloaded_training.py::test_memory_with_everything_on_disk_is_that_of_the_buffers",
    "--deselect=tests/runtime/checkpoint/test_export.py::test_from_pretrained_of_an_export_gives_equal_logits",
)
SMOKE = (
    "tests/runtime/zero",
    "tests/runtime/test_equivalence.py",
    "tests/runtime/checkpoint/test_save_load.py",
    "tests/runtime/checkpoint/test_distributed.py",
    "tests/runtime/offload/test_offloaded_training.py",
    "tests/runtime/optim/test_step_on_device.py",
    "tests/runtime/optim/test_group_counters.py",
    "tests/runtime/precision",
    "tests/runtime/comm",
    "tests/runtime/shared_memory",
    "tests/unit/config/test_load.py",
    "tests/unit/cuda_ops/test_kernels_twins.py",
)
"""Tests of every way in which the runtime calls torch: hooks and storages, collectives, optimizers, files."""


class SupportError(Exception):
    """Something that the combination needs is missing."""


@dataclass(frozen=True)
class Combination:
    python: str
    torch: str
    left_out: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.python}-{self.torch}"

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


COMBINATIONS = (
    # a pipeline needs torch 2.11; the other rooms take long and call of torch what the rest calls
    Combination(
        "3.10",
        "2.6.0",
        (
            *(
                f"--ignore=tests/runtime/{room}"
                for room in (
                    "deadlock",
                    "expert_parallel",
                    "memory",
                    "mesh",
                    "offload_states",
                    "pipeline_parallel",
                )
            ),
            "--deselect=tests/unit/node/test_long_traceback.py::test_an_exception_in_a_group_is_shortened",
            "--deselect=tests/runtime/optim/test_initial_state.py::test_adagrad_with_a_pipeline",
            "--deselect=tests/runtime/test_batch_sizes.py::test_each_batch_of_a_pipeline_is_a_step",
            "--deselect=tests/runtime/test_destroyed_engines.py::test_destroyed_engines_keep_no_descriptors_and_threads[pipeline]",
        ),
    ),
    # between the oldest torch and that of constraints.txt: these call nothing that the two have otherwise
    Combination(
        "3.12",
        "2.11.0",
        tuple(
            f"--ignore=tests/{place}"
            for place in (
                "runtime/activation",
                "runtime/backward_step",
                "runtime/checkpoint",
                "runtime/collective_step",
                "runtime/one_bit",
                "runtime/deadlock",
                "runtime/expert_parallel",
                "runtime/memory",
                "runtime/mesh",
                "runtime/offload_states",
                "runtime/optim/test_narrow_state.py",
                "runtime/sequence_parallel",
                "runtime/tensor_parallel",
                "unit/cli/test_estimate.py",
            )
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    passed: int
    failed: int
    seconds: float
    status: int

    @property
    def good(self) -> bool:
        return self.status == 0 and self.failed == 0 and self.passed > 0

    def __str__(self) -> str:
        aborted = f", pytest's exit code is {self.status}" if self.status not in (0, 1) else ""
        return f"{self.passed} passed, {self.failed} failed in {self.seconds:.0f} s{aborted}"


def interpreter(version: str) -> str:
    """Find a Python of this version that can make virtual environments."""
    own = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    newest = sorted(own, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])], reverse=True)
    works = f"import sys, venv, ensurepip; assert '%d.%d' % sys.version_info[:2] == '{version}'"
    for found in (shutil.which(f"python{version}"), *map(str, newest)):
        if found and subprocess.run([found, "-c", works], capture_output=True).returncode == 0:
            return found
    raise SupportError(
        f"there is no Python {version} with the modules venv and ensurepip: put python{version} on PATH, "
        f"or run `pyenv install {version}`"
    )


def prepare(combination: Combination, torch_index: str) -> Path:
    """Make the combination's virtual environment, unless it is there; give its Python."""
    folder = combination.folder
    python, mark = folder / "bin" / "python", folder / MARK
    constraints = _constraints()
    made_of = "\n".join([*WANTED, (ROOT / "pyproject.toml").read_text(), constraints])
    if mark.exists() and mark.read_text() == made_of:
        return python
    base = interpreter(combination.python)
    print(f"{combination}: installing into {folder.relative_to(ROOT)}", flush=True)
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted call has left
        _done([base, "-m", "venv", str(folder)], "making the virtual environment")
    mark.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip.append("--no-compile")  # most of torch is never imported
    torch = f"torch=={combination.torch}"
    if torch_index:
        first = [*pip, "--no-deps", "--retries", "1", "--timeout", "15", "--index-url", torch_index, torch]
        if subprocess.run(first, cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
            print(f"{torch_index} has no matching torch: using the default index", flush=True)
    file = folder / "constraints.txt"
    file.write_text(constraints)
    _done([*pip, "-c", str(file), torch, *WANTED], "pip install")
    mark.write_text(made_of)
    return python


def _constraints() -> str:
    """Return the lines of constraints.txt but those of TORCHS_OWN."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(TORCHS_OWN))


def _done(command: list[str], what: str) -> None:
    """Run the command, which has to succeed."""
    if status := subprocess.run(command, cwd=ROOT).returncode:
        raise SupportError(f"{what} ended with exit code {status}")


def run(combination: Combination, torch_index: str, tests: Sequence[str]) -> Outcome:
    """Run the tests with this combination."""
    python = prepare(combination, torch_index)
    print(f"{combination}: {' '.join(tests)}", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            str(python),
            "-m",
            "pytest",
            "-n",
            "3",
            "-m",
            "not exhaustive",
            "--no-skips",
        ]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *LEFT_OUT]
        command += [*combination.left_out, *tests]
        status = subprocess.run(command, cwd=ROOT).returncode
        passed, failed = _counts(report)
    return Outcome(passed, failed, time.monotonic() - begin, status)


def _counts(report: Path) -> tuple[int, int]:
    """Count the tests that passed and those that did not, in pytest's report."""
    if not report.exists():
        return 0, 0
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = sum(any(child.tag in ("failure", "error", "skipped") for child in case) for case in cases)
    return len(cases) - failed, failed


def main() -> int:
    """Run every combination, and print what came of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.support", description="Test other versions.")
    parser.add_argument("--smoke", action="store_true", help="run few tests of every room that calls torch")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first that fails")
    parser.add_argument("--remove", action="store_true", help="remove each installation after its tests")
    parser.add_argument(
        "--torch-index", default=TORCH_INDEX, metavar="URL", help="where to look for torch first"
    )
    parser.add_argument("--prepare", action="store_true", help="install the combinations, run no test")
    args = parser.parse_args()
    if args.prepare:
        for combination in COMBINATIONS:
            prepare(combination, args.torch_index)
        return 0
    good, lines = True, []
    for combination in COMBINATIONS:
        try:
            outcome = run(combination, args.torch_index, SMOKE if args.smoke else TESTS)
            good, line = good and outcome.good, str(outcome)
        except SupportError as error:
            good, line = False, f"not run: {error}"
        lines.append(f"{combination}: {line}")
        if args.remove:
            shutil.rmtree(combination.folder, ignore_errors=True)
        if not good and not args.keep_going:
            break
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
