"""Test zlaunch and its runtime below a real mpirun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S
from tests.ports import reserved_port

COMMANDS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"),
    "MPICH": ("mpiexec.hydra", "-n", "2"),
}
STARTERS = [pytest.param(name, marks=pytest.mark.needs(command[0])) for name, command in COMMANDS.items()]


def below(name: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run two tasks of a command."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "SLURM_JOB_ID")
    return subprocess.run(
        [*COMMANDS[name], *command],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k not in names}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STARTERS)
def test_two_launches_on_one_node_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = below(name, tmp_path, sys.executable, "-m", "zlaunch", "--num_gpus=1", "train.py")
    assert done.returncode == 2 and "started zlaunch 2 times" in done.stderr, done
    assert "trained" not in done.stdout
    alone = below(name, tmp_path, sys.executable, "-m", "zlaunch", "--launcher=local", "train.py")
    assert alone.returncode == 0 and alone.stdout.count("trained") >= 2, alone


SCRIPT = """
    import os, sys, torch, zlaunch
    from zlaunch.compat.deepspeed import install
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    try:
        zlaunch.initialize(model=torch.nn.Linear(4, 4), config=config)
    except Exception as error:
        os.write(1, f"refused: {error}\\n".encode())  # at once: two ranks write to one pipe
    install()
    import deepspeed
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(4, 4), config=config, distributed_port=int(sys.argv[1])
    )
    total = torch.tensor(float(os.environ["LOCAL_RANK"]))
    deepspeed.comm.all_reduce(total)
    os.write(1, f"world {engine.world_size} sum {total.item()}\\n".encode())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STARTERS)
def test_a_script_of_deepspeed_finds_its_ranks_and_one_of_zlaunch_does_not_train_alone(
    tmp_path: Path, name: str
) -> None:
    """`zlaunch.initialize` is refused where not all variables are set; DeepSpeed's asks MPI's."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    with reserved_port() as port:
        done = below(name, tmp_path, sys.executable, "train.py", str(port))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused: ") == 2, done
    assert done.stdout.count("one of 2 ranks, but RANK, WORLD_SIZE, MASTER_ADDR") == 2, done
    assert done.stdout.count("world 2 sum 1.0") == 2, done
