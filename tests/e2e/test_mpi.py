"""Test zlaunch and its runtime below a real mpirun on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S

STARTERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"),
    "MPICH": ("mpiexec.hydra", "-n", "2"),
}


def below(name: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run two tasks of a command."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "SLURM_JOB_ID")
    return subprocess.run(
        [*STARTERS[name], *command],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k not in names}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("name", STARTERS)
def test_two_launches_on_one_node_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = below(name, tmp_path, sys.executable, "-m", "zlaunch", "--num_gpus=1", "train.py")
    assert done.returncode == 2 and "has started zlaunch 2 times" in done.stderr, done
    assert "trained" not in done.stdout
    alone = below(name, tmp_path, sys.executable, "-m", "zlaunch", "--launcher=local", "train.py")
    assert alone.returncode == 0 and alone.stdout.count("trained") >= 2, alone


@pytest.mark.parametrize("name", STARTERS)
def test_a_script_of_deepspeed_finds_its_ranks(tmp_path: Path, name: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "train.py").write_text(
        textwrap.dedent(f"""
            import os, torch
            from zlaunch.compat.deepspeed import install
            install()
            import deepspeed
            config = {{"train_batch_size": 2, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}}}}
            engine, *_ = deepspeed.initialize(
                model=torch.nn.Linear(4, 4), config=config, distributed_port={port}
            )
            total = torch.tensor(float(os.environ["LOCAL_RANK"]))
            deepspeed.comm.all_reduce(total)
            # at once: two ranks write to one pipe
            os.write(1, f"world {{engine.world_size}} sum {{total.item()}}\\n".encode())
        """)
    )
    done = below(name, tmp_path, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world 2 sum 1.0") == 2, done


@pytest.mark.parametrize("name", STARTERS)
def test_a_script_that_would_train_alone_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, zlaunch\n"
        "config = {'train_batch_size': 1, 'optimizer': {'type': 'AdamW'}}\n"
        "zlaunch.initialize(model=torch.nn.Linear(4, 4), config=config)\n"
    )
    done = below(name, tmp_path, sys.executable, "train.py")
    assert done.returncode != 0 and "this is one of 2 ranks, but not all of RANK" in done.stderr, done
