"""Test runs that are killed and go on from the memory of their nodes, without a disk."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch
from tests.limits import wait_until

TRAIN = """
    import os, signal, sys, time, torch, zlaunch

    stage, every, die_at, last = map(int, sys.argv[1:5])
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"in_memory": {"every": every}},
    }
    layers = torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers)
    engine, _, loader, _ = zlaunch.initialize(
        model=model, config=config, training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)))
    torch.manual_seed(engine.global_rank)
    engine.client_state = dict
    engine.load_checkpoint(zlaunch.resume_dir())
    print("memory in", os.environ["ZLAUNCH_MEMORY_DIR"], flush=True)
    print("begins at", engine.global_steps, os.getpid(), flush=True)
    while engine.global_steps < last:
        for a, b in loader:
            loss = (engine(a) - b).square().mean()
            engine.backward(loss)
            engine.step()
            print("step", engine.global_steps, loss.item(), flush=True)
            while engine.global_steps == die_at and not os.path.exists("go"):
                time.sleep(0.01)
            if engine.global_steps == last:
                break
"""


def _log(launch: Launch, rank: int) -> str:
    try:
        return launch.log(rank)
    except OSError:
        return ""


def losses(launch: Launch, rank: int) -> dict[int, float]:
    """Returns the loss of every step, of the last time that it was made."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) (\S+)\n", _log(launch, rank))}


def begins(launch: Launch, rank: int = 0) -> list[tuple[int, int]]:
    """The step at which each attempt begins, and the worker's process."""
    return [(int(step), int(pid)) for step, pid in re.findall(r"begins at (\d+) (\d+)\n", _log(launch, rank))]


def train(folder: Path, *, stage: int = 2, every: int = 5, die_at: int = 0, last: int = 20) -> Launch:
    folder.mkdir()
    return Launch(
        folder,
        "--num_gpus=2",
        "--no_local_rank",
        "--max_restarts=10",
        script=TRAIN,
        args=(str(stage), str(every), str(die_at), str(last)),
        env={"CUDA_VISIBLE_DEVICES": ""},
    )


def memory(launch: Launch) -> set[str]:
    """Find the folders in the node's memory that agents of this run have made and that are still there."""
    text = _log(launch, 0) + _log(launch, 1)
    return {folder for folder in re.findall(r"memory in (\S+)\n", text) if os.path.isdir(folder)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_goes_on_exactly_without_a_disk(tmp_path: Path, stage: int) -> None:
    straight = train(tmp_path / "straight", stage=stage)
    killed = train(tmp_path / "killed", stage=stage, die_at=13)
    wait_until(lambda: 13 in losses(killed, 0) and 13 in losses(killed, 1), "step 13")
    assert memory(killed)
    os.kill(begins(killed, 1)[-1][1], signal.SIGKILL)
    (tmp_path / "killed" / "go").touch()
    assert straight.wait() == 0, straight.err
    assert killed.wait() == 0, killed.err
    assert [step for step, _ in begins(killed)][-2:] == [0, 10]
    for rank in (0, 1):
        assert losses(killed, rank) == losses(straight, rank)
    assert not list((tmp_path / "killed").glob("**/*.safetensors"))
    assert not memory(straight) | memory(killed)


@pytest.mark.exhaustive
def test_the_memory_goes_with_its_agent(tmp_path: Path) -> None:
    """kill -9 of the agent, and of the launcher: nothing is left, and nothing is gone on from."""
    launch = train(tmp_path / "a", die_at=13)
    wait_until(lambda: 13 in losses(launch, 0) and memory(launch), "step 13")
    os.kill(launch.agent_pid(), signal.SIGKILL)
    (tmp_path / "a" / "go").touch()
    assert launch.wait() == 0, launch.err
    assert [step for step, _ in begins(launch)] == [0, 0]
    wait_until(lambda: not memory(launch), "an empty memory")
    launch = train(tmp_path / "b", die_at=13)
    wait_until(lambda: 13 in losses(launch, 0) and memory(launch), "step 13")
    launch.process.kill()
    wait_until(lambda: not memory(launch), "an empty memory")


@pytest.mark.exhaustive
def test_a_rank_that_dies_again_and_again(tmp_path: Path) -> None:
    """Ten kills at any moment: every restart goes on from a snapshot, and the losses are those of one run."""
    straight = train(tmp_path / "straight", last=100)
    killed = train(tmp_path / "killed", every=1, last=100)
    for number in range(10):
        at = partial(begins, killed, number % 2)
        wait_until(lambda at=at, number=number: len(at()) > number, f"attempt {number}")  # type: ignore[misc]
        time.sleep(0.02 * number)
        os.kill(at()[number][1], signal.SIGKILL)
    assert straight.wait() == 0, straight.err
    assert killed.wait() == 0, killed.err
    assert [losses(killed, rank) for rank in (0, 1)] == [losses(straight, rank) for rank in (0, 1)]
