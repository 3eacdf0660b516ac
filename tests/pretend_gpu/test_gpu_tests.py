"""Run the tests for GPUs on pretended ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.limits import LIMIT_S
from tests.pretend_gpu.ranks import ROOT


def passed_on_it(*chosen: str) -> int:
    """Run tests on pretended GPUs; return how many have passed."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretend_gpu.plugin", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * LIMIT_S)
    assert done.returncode == 0, done.stdout[-5000:]
    return int(done.stdout.rpartition(" passed")[0].split()[-1])


APART = {
    "optimizers": ("test_optimizers.py",),
    "checkpoints": ("test_checkpoint.py", "test_docs_commands.py"),
}
"""Files that take long, so that not all of them belong to one quarter of the exhaustive cases."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("files", [*APART, "others"])
def test_the_tests_for_a_gpu_pass_on_it(files: str) -> None:
    if files == "others":
        apart = [file for group in APART.values() for file in group]
        chosen = ["tests/gpu", *(f"--ignore=tests/gpu/{file}" for file in apart)]
    else:
        chosen = [f"tests/gpu/{file}" for file in APART[files]]
    # what rests in fp32 takes the ways of what rests in bf16
    assert passed_on_it("-k", "not fp32", *chosen) >= 20


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folders", "least"),
    [
        (("test_equivalence.py", "mesh", "backward_step", "collective_step", "zero"), 12),
        (("checkpoint", "pipeline_parallel", "test_recovery_from_errors.py"), 4),
        (("tensor_parallel", "expert_parallel", "sequence_parallel"), 6),
    ],
    ids=["stages", "checkpoints and pipelines", "other axes"],
)
def test_the_tests_of_several_gpus_pass_on_it(
    folders: tuple[str, ...], least: int, pytestconfig: pytest.Config
) -> None:
    turn = (f"--turn={pytestconfig.getoption('--turn')}", "--no-rotation")
    paths = [f"tests/runtime/{folder}" for folder in folders]
    assert passed_on_it("-m", "multi_gpu and not exhaustive", *turn, *paths) >= least
