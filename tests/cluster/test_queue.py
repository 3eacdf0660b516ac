"""Test the queue on the testbed: over the hosts of a hostfile, and SLURM's behind the same words."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S, wait_until

SCRIPT = """
import os, socket, time
with open("log", "a") as file:
    file.write(f"{os.environ['ZLAUNCH_RUN_ID']} {socket.gethostname()} {os.environ['WORLD_SIZE']}\\n")
while not os.path.exists("go"):
    time.sleep(0.05)
"""


class Shell:
    """Runs zlaunch in a folder that has a script."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env
        (folder / "train.py").write_text(SCRIPT)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zlaunch", *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def say(self, *arguments: str) -> str:
        """Give what the command prints, where it ends well."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self) -> list[list[str]]:
        """Give what the scripts have noted: run, host, world size."""
        path = self.folder / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.exhaustive
def test_hosts_are_given_to_runs_that_wait(
    cluster: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    shell = Shell(tmp_path, env)
    where = (f"--hostfile={cluster.hostfile}", f"--ssh_config={cluster.ssh_config}", "--no_local_rank")
    runs = [shell.say("submit", *where, "--num_nodes=1", "train.py") for _ in range(4)]
    both = shell.say("submit", *where, "--num_gpus=1", "train.py")
    wait_until(lambda: len(shell.log()) == 6, "three runs")
    hosts = {run: host for run, host, _ in shell.log()}
    assert list(hosts) and set(hosts) == set(runs[:3]) and sorted(hosts.values()) == sorted(cluster.hosts)
    assert {world for _, _, world in shell.log()} == {"2"}
    (tmp_path / "go").touch()
    assert [shell.call("wait", run).returncode for run in (*runs, both)] == [0] * 5
    assert sorted(host for run, host, _ in shell.log() if run == both) == sorted(cluster.hosts)


@pytest.mark.exhaustive
def test_slurm_has_the_same_words(cluster: Testbed, tmp_path: Path) -> None:
    shell = Shell(tmp_path, {**cluster.env(), "PYTHONPATH": str(ROOT)})

    def jobs() -> dict[str, Any]:
        return {job["id"]: job for job in json.loads(shell.say("queue", "--json"))}

    first = shell.say("submit", "--no_local_rank", "--num_nodes=2", "--num_gpus=2", "--time=10", "train.py")
    later = shell.say("submit", "--no_local_rank", f"--after={first}", "--num_gpus=1", "train.py")
    wait_until(lambda: len(shell.log()) == 4, lambda: f"the first job: {jobs()}")
    assert {world for _, _, world in shell.log()} == {"4"} and len({host for _, host, _ in shell.log()}) == 2
    assert jobs()[first]["state"] == "RUNNING" and jobs()[first]["limit"] == "10:00"
    assert jobs()[later]["state"] == "PENDING" and "Dependency" in jobs()[later]["why"]
    assert first in shell.say("queue")
    (tmp_path / "go").touch()
    wait_until(lambda: len(shell.log()) == 5, "the second job")
    wait_until(lambda: not jobs(), "both have ended")
    (tmp_path / "go").unlink()
    last = shell.say("submit", "--no_local_rank", "train.py")
    wait_until(lambda: len(shell.log()) == 6, "the last job")
    assert shell.say("cancel", last) == f"{last}: cancelled"
    wait_until(lambda: not jobs(), "it is cancelled")
    for arguments, text in (
        (("submit", "--priority=1", "train.py"), "--priority needs --queue local"),
        (("submit", "--retries=1", "train.py"), "--max_restarts"),
        (("submit", "--after=x", "train.py"), "needs a SLURM job ID"),
        (("submit", "--time=soon", "train.py"), "--time 'soon'"),
        (("submit", "missing.py"), "missing.py"),
        (("cancel", "x"), "no run 'x'"),
        (("cancel", "999999"), "999999"),
    ):
        done = shell.call(*arguments)
        assert done.returncode == 2 and text in done.stderr, (arguments, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.rotated
def test_commands_take_the_job_of_slurm_and_its_run(cluster: Testbed, tmp_path: Path) -> None:
    """From a machine that is no node of the job, as a login node."""
    shell = Shell(tmp_path, {**cluster.env(), "PYTHONPATH": str(ROOT)})
    one = ("submit", "--no_local_rank", "--num_gpus=1", "--name=first")
    job = shell.say(*one, "train.py")
    later = shell.say(*one, "--sbatch=--begin=now+600", "train.py")
    for arguments, text in (
        (("logs", later), f"SLURM job {later} is pending (BeginTime): its run has not begun"),
        (("wait", "--timeout=0", later), "is pending"),
        (("submit", "--mem", "64G", "train.py"), '--sbatch "--mem=VALUE"'),
    ):
        assert text in shell.call(*arguments).stderr
    shell.say("cancel", later)
    assert f"job {later} has ended (CANCELLED)" in shell.call("wait", later).stderr
    wait_until(lambda: len(shell.log()) == 1, "the job runs")
    waiting = [
        subprocess.Popen([sys.executable, "-m", "zlaunch", "wait", run], cwd=tmp_path, env=shell.env)
        for run in (job, "first")
    ]
    assert "logs -f" in shell.call("attach", job).stderr
    assert f"`scancel {job}` ends its SLURM job" in shell.call("stop", job).stderr
    assert "on n" in shell.say("watch", "--once", "first")
    inside = ["srun", "--overlap", f"--jobid={job}", "-n1", sys.executable, "-m", "zlaunch", "stop", job]
    stopped = subprocess.run(inside, cwd=tmp_path, env=shell.env, capture_output=True, text=True)
    assert "SIGTERM is sent; SLURM may end this command with the job" in stopped.stdout
    assert [process.wait(LIMIT_S) for process in waiting] == [143, 143]
    again = shell.say(*one, "train.py")
    wait_until(lambda: len(shell.log()) == 2, "the next job runs")
    assert shell.say("cancel", "first") == f"{again}: cancelled"
    assert shell.call("wait", again).returncode == 143


TRIAL = """
import os, sys, time
import zlaunch
x = float(sys.argv[1].partition("=")[2])
open(f"begun.{x}", "w").close()
for step in range(1, 4 if x < 3 else 6):
    zlaunch.report(step=step, loss=x)
    while not os.path.exists("go"):
        time.sleep(0.05)
while x == 4:
    time.sleep(1)
raise SystemExit(9 if x == 2 else 0)
"""


@pytest.mark.exhaustive  # tests/e2e/test_sweep.py has shorter ones, without SLURM
def test_a_sweep_is_an_array_of_slurm(cluster: Testbed, tmp_path: Path) -> None:
    shell = Shell(tmp_path, {**cluster.env(), "PYTHONPATH": str(ROOT)})
    (tmp_path / "trial.py").write_text(TRIAL)
    (tmp_path / "grid.yaml").write_text(
        "parameters:\n  --x: [0, 1, 2, 3, 4]\nearly_stopping: {min_steps: 5, factor: 2}\n"
    )
    where = tmp_path / "a folder"
    arguments = (
        "--dir",
        str(where),
        "--at_once=4",
        "grid.yaml",
        "--no_local_rank",
        "--num_gpus=1",
        "trial.py",
    )

    def tasks() -> dict[str, str]:
        return {job["id"]: job["state"] for job in json.loads(shell.say("queue", "--json"))}

    first = subprocess.Popen(
        [sys.executable, "-m", "zlaunch", "sweep", *arguments], cwd=tmp_path, env=shell.env
    )
    wait_until(lambda: len(list(tmp_path.glob("begun.*"))) == 4, "four trials run")  # and only then ask SLURM
    wait_until(lambda: list(tasks().values()).count("RUNNING") == 4, lambda: f"four run: {tasks()}")
    assert len(tasks()) >= 5, tasks()
    first.kill()
    first.wait()
    for path in where.glob("*/slurm_task"):
        path.unlink()  # as if it had been killed before it noted them
    (tmp_path / "other.yaml").write_text("parameters:\n  --x: [7, 8, 9, 7, 8]\n")
    other = shell.call("sweep", *(word.replace("grid", "other") for word in arguments))
    assert other.returncode == 2 and "another sweep or command" in other.stderr, other
    (where / "005").rename(where / "gone")
    gone = shell.call("sweep", *arguments)
    assert gone.returncode == 2 and "005 was removed, but its task" in gone.stderr, gone
    (where / "005").rmdir() if (where / "005").exists() else None
    (where / "gone").rename(where / "005")
    process = subprocess.Popen(
        [sys.executable, "-m", "zlaunch", "sweep", *arguments],
        cwd=tmp_path,
        env=shell.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "5 trials in" in out and "5 known" in out, out
    with open(where / "results.csv", newline="") as file:
        states = [row["state"] for row in csv.DictReader(file)]
    assert states == ["done", "done", "failed 9", "done", "stopped early"], states
    again = shell.call("sweep", *arguments)
    assert again.returncode == 0 and "5 known" in again.stdout and not tasks()
    ended = shell.call("cancel", str(where / "005"))
    assert ended.returncode == 2 and "CANCELLED" in ended.stderr, ended
    refused = shell.call("sweep", "grid.yaml", "--sbatch=-p all --array=3", "trial.py")
    assert refused.returncode == 2 and "the sweep sets this option itself" in refused.stderr


@pytest.mark.rotated
def test_a_function_runs_as_a_job_of_slurm(cluster: Testbed, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, zlaunch\n"
        "def work(x):\n    return x, int(os.environ['RANK'])\n"
        "job = zlaunch.launch(work, 7, num_nodes=2, num_gpus=2, slurm={'time': 5})\n"
        "print(job.result())\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**cluster.env(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(7, rank) for rank in range(4)]}\n"
