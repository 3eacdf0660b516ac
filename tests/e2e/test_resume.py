"""Test runs that are killed, or asked to stop, and go on by themselves exactly where they were."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.helpers import Launch
from tests.limits import wait_until
from zlaunch.cli.main import main
from zlaunch.runtime.preemption import REQUEUE_EXIT_CODE
from zlaunch.supervisor.end import SAVED_CODE

TRAIN = """
    import os, signal, sys, time, torch, zlaunch

    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        def forward(self, x):
            return self.layers(torch.nn.functional.dropout(x, 0.1))

    stage, folder, die_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    last, load, hold = 20, sys.argv[4] == "True", sys.argv[5] == "True"
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_max_lr": 1e-2}},
        "checkpoint": {"on_signal": True, "save_dir": folder, "asynchronous": stage == 2},
    }
    engine, _, loader, _ = zlaunch.initialize(
        model=Noisy(), config=config, training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)))
    torch.manual_seed(engine.global_rank)
    engine.load_checkpoint(zlaunch.resume_dir(folder if load else None))
    print("begins at", engine.global_steps, flush=True)
    answer = signal.getsignal(signal.SIGUSR1)
    def note(*args):
        open(f"signalled.{engine.global_rank}", "w").close()
        answer(*args)
    if hold:
        signal.signal(signal.SIGUSR1, note)
    while engine.global_steps < last:
        for a, b in loader:
            loss = (engine(a) - b).square().mean()
            engine.backward(loss)
            engine.step()
            print("step", engine.global_steps, loss.item(), flush=True)
            if hold and engine.global_steps == 12:
                while not os.path.exists(f"signalled.{engine.global_rank}"):
                    time.sleep(0.01)
            if engine.global_steps % 5 == 0:
                engine.save_checkpoint(folder)
            if engine.global_steps == die_at and not os.path.exists("died"):
                engine.wait_for_checkpoint()
                if engine.global_rank == 0:
                    open("told", "w").close()  # the launcher knows of the checkpoint
                if engine.global_rank == 1:
                    while not os.path.exists("told"):
                        time.sleep(0.01)
                    open("died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
            if engine.global_steps == last:
                break
"""


def losses(launch: Launch, rank: int) -> dict[int, float]:
    """Of every step, the last time it was made."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) (\S+)", launch.log(rank))}


def train(
    folder: Path,
    *options: str,
    stage: int,
    die_at: int = 0,
    load: bool = False,
    hold: bool = False,
    saved: str = "a",
) -> Launch:
    args = (str(stage), str(folder.parent / saved), str(die_at), str(load), str(hold))
    folder.mkdir()
    return Launch(
        folder,
        "--num_gpus=2",
        "--no_local_rank",
        *options,
        script=TRAIN,
        args=args,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.rotated
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_run_that_was_killed_goes_on_exactly(tmp_path: Path, stage: int) -> None:
    """kill -9 of a rank at step 13, a restart from step 10: data, noise and schedule as in a straight run."""
    straight = train(tmp_path / "straight", stage=stage, saved="b")
    killed = train(tmp_path / "killed", "--max_restarts=1", stage=stage, die_at=13)
    assert straight.wait() == 0, straight.err
    assert killed.wait() == 0, killed.err
    assert "restart 1 of 1" in killed.err and "checkpoint global_step10 is in" in killed.err
    for rank in (0, 1):
        assert "begins at 0" in killed.log(rank) and "begins at 10" in killed.log(rank)
        assert losses(killed, rank) == losses(straight, rank)
        assert len(losses(killed, rank)) == 20


@pytest.mark.exhaustive
def test_a_signal_saves_and_asks_for_a_restart(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", stage=3, saved="b")
    assert straight.wait() == 0, straight.err
    asked = train(tmp_path / "asked", stage=3, hold=True)  # which stops at step 12 until the signal has come
    wait_until(
        lambda: (asked.run_dir / "logs" / "rank_00001.log").exists() and "step 7 " in asked.log(1),
        "some steps",
    )
    asked.process.send_signal(signal.SIGUSR1)
    assert asked.wait() == SAVED_CODE == REQUEUE_EXIT_CODE, asked.err
    assert "the run has saved, as it was asked to, and wants to be started again" in asked.err
    assert "failed" not in asked.err
    last = max(losses(asked, 0))
    assert max(losses(asked, 1)) == last >= 7
    saved = last + 1  # the step that saved did not return to the script
    again = train(tmp_path / "again", stage=3, load=True)  # the same script, started by hand
    assert again.wait() == 0, again.err
    for rank in (0, 1):
        assert f"begins at {saved}" in again.log(rank)
        made = losses(asked, rank) | losses(again, rank)
        assert made == {step: loss for step, loss in losses(straight, rank).items() if step != saved}


# -- zlaunch checkpoint


def command(capfd: pytest.CaptureFixture[str], *args: str | Path, code: int = 0) -> str:
    """What the command says, without the seconds that a process of its own takes."""
    assert main(["checkpoint", *map(str, args)]) == code
    said = capfd.readouterr()
    return said.out + said.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    launch = train(folder / "run", stage=3)
    assert launch.wait() == 0, launch.err
    return folder / "a"


@pytest.mark.exhaustive
def test_ls_show_and_verify(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = command(capfd, "ls", saved)
    assert re.findall(r"global_step\d+", shown) == [f"global_step{n}" for n in (20, 15, 10, 5)]
    assert re.search(r"global_step20 +latest +20 .* 2 +3 ", shown)
    listed = json.loads(command(capfd, "ls", saved, "--json"))
    assert [entry["latest"] for entry in listed] == [True, False, False, False]
    shown = command(capfd, "show", saved, "--tag", "global_step10")
    assert re.search(r"layers\.0\.weight +F32 +64 x 4 +trainable +exp_avg, exp_avg_sq, step", shown)
    assert '"global_steps": 10' in shown
    assert {entry["name"] for entry in json.loads(command(capfd, "show", saved, "--json"))["tensors"]} == {
        f"layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
    }
    assert "global_step20: whole," in command(capfd, "verify", saved)
    assert command(capfd, "verify", saved, "--all").count("whole") == 4
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", saved, copy], check=True)
    file = copy / "global_step20" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    message = command(capfd, "verify", copy, code=1)
    assert "rank_00001.safetensors: is damaged between bytes 0 and" in message
    assert "global_step15: whole" in command(capfd, "verify", copy, "--tag", "auto")
    (copy / "global_step20" / "manifest.json").write_text("{}")
    assert "damaged" in command(capfd, "ls", copy)
    assert "is damaged" in command(capfd, "export", copy, tmp_path / "out", code=2)
    assert "no such folder" in command(capfd, "ls", tmp_path / "no", code=2)
    assert "no checkpoint found" in command(capfd, "show", tmp_path, code=2)
    assert "has no checkpoint 'x'" in command(capfd, "show", copy, "--tag", "x", code=2)
    assert "5 apples" in command(
        capfd, "export", saved, tmp_path / "out", "--max_shard_size", "5 apples", code=2
    )
    said = command(
        capfd, "export", saved, tmp_path / "out", "--format", "dcp", "--max_shard_size", "1GB", code=2
    )
    assert "--max_shard_size does not work with --format dcp" in said
    for own in (saved, saved / "global_step20"):
        said = command(capfd, "import", own, tmp_path / "again", code=2)
        assert "is already a zlaunch checkpoint: load it directly" in said
    deepspeed = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints" / "stage2-2"
    assert "zlaunch checkpoint import" in command(capfd, "verify", deepspeed, code=2)
    assert "11 parameters, with exp_avg, exp_avg_sq" in command(capfd, "import", deepspeed, tmp_path / "ours")
    assert "imported: whole" in command(capfd, "verify", tmp_path / "ours")
    said = command(capfd, "import", deepspeed, tmp_path / "ours", code=2)
    assert "imported is a checkpoint already: choose another --as" in said
    said = command(capfd, "import", deepspeed, tmp_path / "ours", "--as", "second")
    assert "latest named imported, and names second now" in said


@pytest.mark.exhaustive
def test_the_script_beside_a_checkpoint_needs_no_zlaunch(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys, runpy; sys.modules['zlaunch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = saved / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    for kind, name in (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")):
        subprocess.run(
            [sys.executable, "-I", "-c", program, script, saved, tmp_path / kind, "--format", kind],
            check=True,
        )
        command(capfd, "export", saved, tmp_path / f"{kind}2", "--format", kind)
        if kind == "bin":
            first = torch.load(tmp_path / kind / name, weights_only=True)
            second = torch.load(tmp_path / f"{kind}2" / name, weights_only=True)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first)
        else:
            assert (tmp_path / kind / name).read_bytes() == (tmp_path / f"{kind}2" / name).read_bytes()
    failed = subprocess.run(
        [sys.executable, script, tmp_path, tmp_path / "x"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1 and failed.stderr.startswith("zero_to_fp32: error: ")
