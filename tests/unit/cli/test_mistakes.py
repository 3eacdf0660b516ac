"""Test the advice for command lines that new users of torchrun, accelerate, deepspeed and srun write.

The table was written from the user's side: what somebody types on the first day, and what they need to read.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from zlaunch.cli.main import main
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.end import End
from zlaunch.system.machine import Devices

MISTAKES: dict[str, tuple[str, ...]] = {
    # Words of other launchers
    "--hostfile hosts --nproc_per_node 9 train.py": ("--nproc_per_node 9: n1 has 8 slots",),
    "--hostfile hosts --nnodes 3 train.py": ("--nnodes 3: there are 2 hosts",),
    "--hostfile hosts --num_gpus 9 train.py": ("--num_gpus 9: n1 has 8 slots",),
    "--gpus 2 train.py": ("--gpus", "--num_gpus"),
    "--nproc 8 train.py": ("--nproc", "--num_gpus"),
    "--nodes 2 train.py": ("--nodes", "--num_nodes"),
    "--ntasks 2 train.py": ("--ntasks", "--num_gpus"),
    "--ntasks-per-node 2 train.py": ("--num_gpus",),
    "--gpus-per-node 2 train.py": ("--num_gpus",),
    "-n 2 train.py": ("-n", "--num_gpus"),
    "-np 2 train.py": ("-n", "--num_gpus"),
    "-N 2 train.py": ("-N", "--num_nodes"),
    "--gpus-per-task=1 train.py": ("--gpus_per_task", "--num_gpus"),
    "--world-size 8 train.py": ("--world_size", "--num_gpus"),
    "--hosts a,b train.py": ("--hosts", "--hostfile"),
    "--nodelist n[1-2] train.py": ("--nodelist", "--include"),
    "--partition gpu train.py": ("--partition", "zlaunch slurm script"),
    "--port 29500 train.py": ("--port", "--master_port"),
    "--resume train.py": ("--resume", "after the script"),
    "--deepspeed ds.json train.py": ("--deepspeed", "after the script"),
    "--config ds.json train.py": ("--config", "after the script"),
    "--background train.py": ("--background", "--detach"),
    "--verbose-log train.py": ("No such option", "--verbose"),
    "--frobnicate train.py": ("No such option", "`zlaunch --help-all`"),
    "--lr 1e-4 train.py": ("--lr", "after the script"),
    "--num_gpsu 2 train.py": ("--num_gpsu", "Did you mean --num_gpus"),
    "--nun-nodes 2 train.py": ("--nun_nodes", "Did you mean --num_nodes"),
    "--autotuning run train.py": ("--autotuning", "zlaunch tune"),
    # Commands that have another name here
    "launch train.py": ("zlaunch train.py",),
    "train --lr 1": ("zlaunch SCRIPT",),
    "status": ("zlaunch ps",),
    "list": ("zlaunch ps",),
    "version": ("zlaunch --version",),
    "kill 20260101-000000-abcdef": ("zlaunch stop 20260101-000000-abcdef",),
    "resume": ("zlaunch SCRIPT", "load_checkpoint"),
    "export ckpt out": ("zlaunch checkpoint export ckpt out",),
    "info": ("zlaunch doctor",),
    "squeue -u me": ("zlaunch queue", "zlaunch slurm queue"),
    "sbatch job.sh": ("zlaunch submit", "zlaunch slurm submit"),
    "check ds.json": ("zlaunch config check",),
    "kill -9 last": ("zlaunch stop --signal KILL last",),
    "kill": ("zlaunch stop RUN",),
    "stop": ("RUN", "last"),
    "slurm submit --dry_run train.py": ("--dry_run", "zlaunch slurm script"),
    "slurm script --exclude n3 train.py": ('--sbatch "--exclude=VALUE"',),
    "slurm submit --spares 1 train.py": ('--zlaunch_args "--spares VALUE"',),
    "stop --timeout nan last": ("--timeout", "nan"),
    "clean": ("zlaunch ps --clean",),
    "lgos": ("zlaunch logs",),
    "python -m torch.distributed.run --nproc_per_node 2 train.py": ("`zlaunch --nproc_per_node 2 train.py`",),
    "sudo mpirun -np 2 python train.py": ("`zlaunch --num_gpus 2 train.py`",),
    "env A=1 python3 train.py": ("`zlaunch train.py`",),
    "--num_gpus 99999999 train.py": ("--num_gpus", "4096"),
    "--num_gpus 2 --log_ranks 5 --dry_run train.py": ("--log_ranks", "there is no rank 5"),
    "lauch train.py": ("lauch", "`zlaunch train.py`"),
    "stauts": ("stauts", "`zlaunch ps`"),
    "checkpoint export ckpt out -dtype bf16": ("-d", "--dtype"),
    "chekpoint ls": ("chekpoint", "zlaunch checkpoint"),
    "estimat --params 7B": ("estimat", "zlaunch estimate"),
    # Scripts
    "trian.py": ("trian.py", "train.py"),
    "nothing_like_it.py": ("nothing_like_it.py", "no script"),
    "python train.py": ("python", "zlaunch train.py"),
    "python3 -u train.py": ("python3", "zlaunch train.py"),
    "torchrun --nproc_per_node 2 train.py": ("torchrun", "leave it out"),
    "accelerate launch train.py": ("accelerate", "leave it out"),
    "srun train.py": ("srun", "leave it out"),
    "train": ("train.py",),
    "notes.ipynb": ("notes.ipynb", "notebook"),
    "project": ("project", "folder"),
    "run.sh": ("run.sh", "--no_python"),
    "job.sbatch": ("job.sbatch", "sbatch job.sbatch"),
    "": ("no script", "zlaunch -h"),
    "submit --nproc_per_node 2 train.py": ("--num_gpus",),
    "submit --nnodes 2 train.py": ("--num_nodes",),
    "-m train.py": ("train.py", "remove -m"),
    # Values
    "--num_gpus all train.py": ("--num_gpus", "'all'", "whole number"),
    "--num_gpus 0 train.py": ("--num_gpus", "0"),
    "--num_gpus": ("--num_gpus", "requires an argument"),
    "--master-port=abc train.py": ("--master_port", "'abc'", "whole number"),
    "--master_port 99999 train.py": ("--master_port", "99999"),
    "--hostfile hosts.txt train.py": ("hosts.txt", "No such file"),
    "--hostfile bad_hosts train.py": ("bad_hosts:1", "slots=8"),
    "--include localhost:x train.py": ("--include", "localhost:x"),
    "--include n9 --hostfile hosts train.py": ("n9", "n1, n2"),
    "--launcher torchrun train.py": ("--launcher torchrun", "ssh"),
    "--num_nodes 3 --hostfile hosts train.py": ("--num_nodes", "3", "2"),
    "--num_gpus 16 --hostfile hosts train.py": ("16", "8"),
    # Commands
    "stop nosuch": ("nosuch", "zlaunch ps"),
    "logs nosuch": ("nosuch", "zlaunch ps"),
    "watch nosuch": ("nosuch", "zlaunch ps"),
    "estimate 7B": ("7B", "--params 7B"),
    "estimate --model 7B": ("--model", "--params"),
    "slurm train.py": ("train.py", "zlaunch slurm script"),
    "config ds.json": ("ds.json", "zlaunch config"),
    "checkpoint out": ("out", "zlaunch checkpoint"),
    "submit": ("no script",),
    "submit --gpus 2 train.py": ("--gpus", "--num_gpus"),
    "init --gpu 2": ("--gpu", "--num_gpus"),
    "tune --gpus 2 train.py": ("--num_gpus",),
}
"""What is typed after `zlaunch` -> what the one line of the answer must contain."""

ACCEPTED = {
    "run train.py": 1,
    "run --num_gpus 3 train.py": 3,
    "--nproc-per-node=3 train.py": 3,
    "--nproc_per_node 3 train.py": 3,
    "--num-gpus 3 train.py": 3,
    "--num_accelerators=3 train.py": 3,
    "--num-processes 3 train.py": 3,
    "./train.py": 1,
    "--num-gpus 2 -- train.py": 2,
}
"""What works, in the words of others -> the number of workers in the plan."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as a new user has it, on a machine without GPU and SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("train.py", "run.sh", "job.sbatch", "notes.ipynb"):
        Path(name).write_text("#!/bin/bash\n" if name.endswith(("sh", "sbatch")) else "{}\n")
    Path("project").mkdir()
    Path("project", "main.py").write_text("")
    Path("ds.json").write_text('{"train_batch_size": 8}')
    Path("hosts").write_text("n1 slots=8\nn2 slots=8\n")
    Path("bad_hosts").write_text("n1 slot=8\n")


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_advice_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("zlaunch")
    assert [part for part in MISTAKES[line] if part not in shown.err] == [], shown.err


@pytest.mark.parametrize("option", ["--mem", "--partition", "--cpus_per_task"])
def test_submit_takes_options_of_sbatch_by_sbatch(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", option, "8", "train.py"]) == 2
    dashed = option.replace("_", "-")
    assert f'use --sbatch "{dashed}=VALUE"' in capsys.readouterr().err


def test_an_option_behind_the_script_is_the_scripts_and_zlaunch_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--dry_run", "train.py", "--num-gpus", "2", "--lr", "1"]) == 0
    said = "zlaunch: warning: --num-gpus stands after train.py and goes to the script."
    assert said in capsys.readouterr().err
    Path("train.py").write_text("parser.add_argument('--num_gpus')")
    assert main(["--dry_run", "train.py", "--num-gpus", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = Devices(("0", "1"), None)
    monkeypatch.setattr("zlaunch.launchers.this_node.discover", lambda environ: devices)
    assert main(["--num_gpus", "8", "train.py"]) == 2
    said = capsys.readouterr().err
    assert said == "zlaunch: error: --num_gpus 8: this machine has 2 GPUs\n"
    assert main(["--include", "localhost:1,2,3", "train.py"]) == 2
    said = capsys.readouterr().err
    assert said == "zlaunch: error: --include 'localhost:1,2,3': no slot 2: this machine has 2 GPUs\n"


def test_a_queued_run_whose_gpu_is_gone_is_refused_by_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlaunch.launchers.this_node.discover", lambda environ: Devices(("0", "1"), None))
    folder = tmp_path / "run"
    folder.mkdir()
    run_folder.queued(str(folder), "id", ["localhost"], 1, ["train.py"])
    words = ["--run_id", "id", "--run_dir", str(folder), "--include", "localhost:3", "train.py"]
    assert main(["--dry_run", *words]) == 2
    assert run_folder.own_end(str(folder), 2) == End(2, "refused"), "nothing was to be started"
    assert main(words) == 2
    assert run_folder.own_end(str(folder), 2) == End(2, "host refused", slots=(("localhost", 3),))


@pytest.mark.parametrize("slurm", [True, False])
def test_several_nodes_on_a_login_node(
    slurm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if slurm:
        (tmp_path / "salloc").touch(mode=0o755)
    assert main(["--dry_run", "--num_nodes", "2", "train.py"]) == 2
    advice = ", or use `zlaunch slurm submit` or salloc" if slurm else ""
    said = f"--num_nodes 2: this is the only machine; give a --hostfile{advice}\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("line", ACCEPTED)
def test_the_words_of_other_launchers_work(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = line.split()
    plan = ["--dry-run", "--json"]
    words = [first, *plan, *rest] if first == "run" else [*plan, first, *rest]
    assert main(words) == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert len(node["workers"]) == ACCEPTED[line]


def test_gpus_of_a_slurm_job_that_are_not_visible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = socket.gethostname().partition(".")[0]
    for name, value in (
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_NODELIST", here),
        ("SLURM_NODELIST", here),
        ("SLURM_JOB_NUM_NODES", "1"),
        ("SLURM_GPUS_ON_NODE", "2"),
    ):
        monkeypatch.setenv(name, value)
    assert main(["--dry_run", "--json", "train.py"]) == 0
    said = "zlaunch: warning: SLURM gave 2 GPU(s), but none is visible: the workers use the CPU\n"
    shown = capsys.readouterr()
    assert said in shown.err
    (node,) = json.loads(shown.out)["nodes"]
    assert len(node["workers"]) == 2, "as many as on each of several nodes"
