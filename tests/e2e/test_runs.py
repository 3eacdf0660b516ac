"""Test `zlaunch ps`, `stop` and `stacks` on real runs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, Launch, alive, run
from tests.limits import LIMIT_S, wait_until

SCRIPT = """
    import time
    def deep_in_the_users_code():
        print("up", flush=True)
        time.sleep(600)
    deep_in_the_users_code()
"""


def zlaunch(
    folder: Path, *arguments: str | Path, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """The command in a folder, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "zlaunch", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def ps(folder: Path, *arguments: str | Path) -> Any:
    """What `zlaunch ps --json` says."""
    done = zlaunch(folder, "ps", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def change_record(run_dir: Path, **values: Any) -> None:
    path = run_dir / "launcher.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A run with two ranks that are up."""
    launch = Launch(tmp_path, "--num_gpus=2", "--log_ranks=all", script=SCRIPT)
    try:
        wait_until(lambda: launch.out.count("up") == 2, "both ranks up")
        yield launch
    finally:
        launch.process.send_signal(signal.SIGTERM)
        launch.wait()


@pytest.mark.rotated
def test_a_run_is_listed_shown_and_stopped(launch: Launch, tmp_path: Path) -> None:
    [listed] = ps(tmp_path, ".")
    assert (listed["run"], listed["state"], listed["world_size"]) == ("run", "running", 2)
    assert (listed["run_id"], listed["pid"]) == (launch.run_id, launch.process.pid)
    table = zlaunch(tmp_path, "ps", ".").stdout
    assert "running" in table and "localhost" in table

    shown = ps(tmp_path, "run")
    assert shown["state"] == "running"
    assert shown["ranks"] == [
        {"rank": rank, "host": "localhost", "pid": launch.worker_pid(rank), "state": "running"}
        for rank in (0, 1)
    ]

    stopped = zlaunch(tmp_path, "stop", "run")
    assert (stopped.returncode, stopped.stdout) == (0, "run: stopped, exit code 143\n"), stopped.stderr
    assert launch.wait() == 143 and not alive(launch.run_id)
    assert ps(tmp_path, ".") == []
    assert "1 has ended: --all" in zlaunch(tmp_path, "ps", ".").stdout
    assert [r["state"] for r in ps(tmp_path, ".", "--all")] == ["ended 143"]
    assert {r["state"] for r in ps(tmp_path, "run")["ranks"]} == {"killed by SIGTERM"}
    for command in ("stop", "stacks"):
        again = zlaunch(tmp_path, command, "run")
        assert again.returncode == 2 and "run has already ended" in again.stderr
        assert again.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_stacks_of_all_and_of_some_ranks(launch: Launch, tmp_path: Path) -> None:
    done = zlaunch(tmp_path, "stacks", launch.run_dir)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        heading = f"== rank {rank} on localhost, process {launch.worker_pid(rank)} ==\n"
        after = done.stdout.partition(heading)[2]
        assert "deep_in_the_users_code" in after.partition("==")[0]
    one = zlaunch(tmp_path, "stacks", "--rank", "1", launch.run_dir)
    assert one.returncode == 0 and "rank 1 on" in one.stdout and "rank 0 on" not in one.stdout

    os.kill(launch.worker_pid(0), signal.SIGSTOP)
    half = zlaunch(tmp_path, "stacks", "run")
    assert half.returncode == 1 and "no answer from rank 0 (running)" in half.stderr
    assert "deep_in_the_users_code" in half.stdout

    wrong = zlaunch(tmp_path, "stacks", "run", "--rank", "0-2")
    assert wrong.returncode == 2 and "there is no rank 2" in wrong.stderr
    assert launch.process.poll() is None, "the run goes on"


@pytest.mark.rotated
def test_stop_that_takes_too_long_and_by_force(launch: Launch, tmp_path: Path) -> None:
    for rank in (0, 1):
        os.kill(launch.worker_pid(rank), signal.SIGSTOP)  # "save and stop" goes unheard
    late = zlaunch(tmp_path, "stop", "run", "--signal", "USR1", "--timeout", "0.3")
    assert late.returncode == 1 and "has not ended within 0.3 s" in late.stderr
    forced = zlaunch(tmp_path, "stop", "run", "--signal", "kill")
    assert (forced.returncode, forced.stdout) == (0, "run: launcher killed; its agents stop the workers\n")
    assert ps(tmp_path, "run")["state"] == "gone"
    gone = zlaunch(tmp_path, "stop", "run")
    assert gone.returncode == 2 and "is gone" in gone.stderr
    wait_until(lambda: not alive(launch.run_id), "workers stopped")


NOTHING_SAVES = """
    import time
    from zlaunch.runtime import preemption
    preemption.install()  # as an engine does
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_second_run_in_a_folder_says_that_it_replaces_the_logs(tmp_path: Path) -> None:
    for number, said in (("first", False), ("second", True)):
        run = Launch(tmp_path, "--num_gpus", "1", script=f"print('{number}')")
        assert run.wait() == 0, run.err
        assert ("logs in run (replacing those of an earlier run)" in run.out + run.err) is said
        assert run.log(0).strip() == number


@pytest.mark.exhaustive
def test_stop_says_at_once_that_nothing_saves(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", "--no_local_rank", script=NOTHING_SAVES)
    wait_until(lambda: "up" in launch.out, "worker is up")
    late = zlaunch(tmp_path, "stop", "run", "--signal", "USR1", "--timeout", "5")
    assert late.returncode == 1, late
    told, ended = late.stderr.splitlines()
    assert told.startswith("zlaunch stop: warning: run: nothing saves on it.") and "Trainer" in told
    assert "has not ended within 5 s" in ended
    assert zlaunch(tmp_path, "stop", "run").returncode == 0


@pytest.mark.rotated
def test_a_launcher_that_cannot_be_reached_from_here(launch: Launch, tmp_path: Path) -> None:
    good = json.loads((launch.run_dir / "launcher.json").read_text())
    change_record(launch.run_dir, host="elsewhere")
    assert ps(tmp_path, ".")[0]["state"] == "on elsewhere"
    there = zlaunch(tmp_path, "stop", "run")
    assert (
        there.returncode == 2
        and f"ssh elsewhere {sys.executable} -m zlaunch stop {launch.run_dir}" in there.stderr
    )
    # Another process has the launcher's number by now.
    change_record(launch.run_dir, host=good["host"], start_ticks=good["start_ticks"] - 1)
    assert ps(tmp_path, "run")["state"] == "gone"
    assert zlaunch(tmp_path, "stop", "run").returncode == 2
    assert launch.process.poll() is None


@pytest.mark.rotated
def test_how_ranks_end(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["ZLAUNCH_RESTART_COUNT"] == "0": sys.exit(5)
        if os.environ["RANK"] == "0": sys.exit(0)
        while os.path.exists(f"/proc/{os.getppid()}") and not os.path.exists("now"): time.sleep(0.01)
        os.kill(os.getpid(), 9)
    """
    launch = Launch(tmp_path, "--num_gpus=2", "--max_restarts=1", script=script)
    wait_until(lambda: any(e["returncode"] == 0 for e in launch.events("exit")), "rank 0 done")
    states = [r["state"] for r in ps(tmp_path, "run")["ranks"]]
    assert states == ["exited 0", "running"] and ps(tmp_path, ".")[0]["attempt"] == 1
    (tmp_path / "now").touch()
    assert launch.wait() == 137
    assert [r["state"] for r in ps(tmp_path, "run")["ranks"]] == ["exited 0", "killed by SIGKILL"]


def test_programs_that_are_not_python_have_no_stacks(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--no_python", "sleep", "600")
    launch.worker_pid(0)
    done = zlaunch(tmp_path, "stacks", "run")
    assert done.returncode == 2 and "--no_python" in done.stderr
    assert zlaunch(tmp_path, "stop", "run", "--signal", "INT").stdout == "run: stopped, exit code 130\n"
    assert launch.wait() == 130


@pytest.mark.exhaustive
def test_names_below_runs_and_names_that_are_wrong(tmp_path: Path) -> None:
    done = run(tmp_path, script="pass")
    step = tmp_path / "runs" / "slurm-7.0" / "task_00000"
    step.parent.mkdir(parents=True)
    assert zlaunch(tmp_path, "ps").stdout == "no runs in runs\n"
    done.run_dir.rename(step)
    assert [r["run"] for r in ps(tmp_path, "-a")] == ["slurm-7.0/task_00000"]
    assert zlaunch(tmp_path, "ps").stdout == "no run is running in runs; 1 has ended: --all\n"
    for name, words in (
        ("slurm-7.0/task_00000", "has already ended"),
        ("slurm-7.0/task_0000", "has already ended"),
        ("slurm-7.0/task_0001", "no run 'slurm-7.0/task_0001', did you mean 'slurm-7.0/task_00000'?"),
        ("slurm-7.0", "is a folder of runs: name one of them, such as runs/slurm-7.0/task_00000"),
        (str(step), "has already ended"),
        (str(step / "logs"), "no launcher.json"),
        ("zzz", "`zlaunch ps --all` lists the runs in runs/; name a run of --run_dir by its folder"),
    ):
        refused = zlaunch(tmp_path, "stop", name)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
        assert refused.stderr.startswith("zlaunch stop: error: ") and refused.stderr.count("\n") == 1
    assert zlaunch(tmp_path, "ps", "nowhere").returncode == 2
    assert [r["state"] for r in ps(tmp_path, step)["ranks"]] == ["exited 0"]


@pytest.mark.exhaustive
def test_last_is_the_newest_run(tmp_path: Path) -> None:
    assert "last: no runs in /" in zlaunch(tmp_path, "ps", "last").stderr
    for name in ("older", "newer"):
        run(tmp_path, script="pass").run_dir.rename(tmp_path / name)
    (tmp_path / "runs").mkdir()
    for name in ("newer", "older"):
        (tmp_path / name).rename(tmp_path / "runs" / name)
    assert ps(tmp_path, "last")["run"] == "newer"
    for command in ("stop", "stacks"):
        assert "runs/newer has already ended" in zlaunch(tmp_path, command, "last").stderr
    (tmp_path / "runs" / "older").rename(tmp_path / "runs" / "last")  # what has the name is meant
    assert "last has already ended" in zlaunch(tmp_path, "stop", "last").stderr
    assert ps(tmp_path, "last")["run"] == "last"


@pytest.mark.exhaustive
def test_clean_removes_what_runs_that_have_ended_left(launch: Launch, tmp_path: Path) -> None:
    done = tmp_path / "runs" / "slurm-7.0" / "task_00000"
    mine, job = tmp_path / "runs" / "mine", tmp_path / "runs" / "job"
    for folder in (done, mine, job):
        (tmp_path / "short").mkdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(tmp_path / "short", script="pass").run_dir.rename(folder)
        (tmp_path / "short" / "worker.py").unlink()
        for name in ("out", "err"):
            (tmp_path / "short" / name).unlink()
        (tmp_path / "short").rmdir()
    (mine / "weights").mkdir()
    (mine / "weights" / "model.bin").write_text("mine")
    (mine / "logs" / "my.log").write_text("mine")
    for name in ("batches.json", "packages.txt", "git.diff", "script_copy.py"):  # a longer run has these, too
        (done / name).write_text("")
    (job / "checkpoint.json").write_text('{"job": "7"}')
    (tmp_path / "runs" / "living").symlink_to(launch.run_dir)

    asked = zlaunch(tmp_path, "ps", "--clean")
    assert asked.returncode == 2 and "add --yes to remove the 2 runs listed above" in asked.stderr
    listed = asked.stdout.splitlines()
    assert [line.partition(":")[0] for line in listed] == [
        "runs/slurm-7.0/task_00000",
        "runs/mine",
        "runs/job",
    ]
    assert "stays: SLURM job 7" in listed[2] and all("ended 0" in line for line in listed)
    assert done.is_dir() and (mine / "launcher.json").exists()

    begun = os.open(mine, os.O_RDONLY)
    fcntl.flock(begun, fcntl.LOCK_EX)  # as a launch has it from its beginning
    assert "stays: a launch has just begun there" in zlaunch(tmp_path, "ps", "--clean", str(mine)).stdout
    os.close(begun)

    cleaned = zlaunch(tmp_path, "ps", "--clean", "--yes")
    assert cleaned.returncode == 0, cleaned.stderr
    assert "runs/mine: logs, weights stay: not zlaunch's\n" in cleaned.stdout
    assert cleaned.stdout.endswith("removed 2 runs\n")
    assert not done.parent.exists()
    left = sorted(str(path.relative_to(mine)) for path in mine.rglob("*"))
    assert left == ["logs", "logs/my.log", "weights", "weights/model.bin"]
    assert (job / "launcher.json").exists() and (job / "logs" / "rank_00000.log").exists()
    assert "nothing to remove" in zlaunch(tmp_path, "ps", "--clean", "--yes").stdout

    assert launch.process.poll() is None and launch.log(0) == "up\n"
    living = zlaunch(tmp_path, "ps", "run", "--clean", "--yes")
    assert living.returncode == 0 and living.stdout == "nothing to remove\n"
    for wrong in (("--yes",), ("--clean", "--all"), ("--clean", "--json")):
        assert zlaunch(tmp_path, "ps", *wrong).returncode == 2


def test_clean_leaves_runs_that_may_still_have_workers(launch: Launch, tmp_path: Path) -> None:
    change_record(launch.run_dir, host="elsewhere")
    stays = zlaunch(tmp_path, "ps", "run", "--clean", "-y").stdout
    assert "stays: only elsewhere can tell" in stays and "nothing to remove" in stays
    change_record(launch.run_dir, host=os.uname().nodename)
    agent = launch.agent_pid()
    both = (int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), agent)
    for pid in both:
        os.kill(pid, signal.SIGSTOP)  # the agent would end its workers, and the guard wake the agent
    launch.process.kill()
    launch.wait()
    stays = zlaunch(tmp_path, "ps", "run", "--clean", "-y").stdout
    assert f"run: gone, stays: process {launch.worker_pid(0)} of it is still alive" in stays
    run_id = launch.run_id
    for pid in both:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not alive(run_id), "workers stopped")
    cleaned = zlaunch(tmp_path, "ps", "run", "--clean", "-y")
    assert cleaned.stdout.endswith("removed 1 run\n") and not launch.run_dir.exists(), cleaned.stderr


@pytest.mark.parametrize(("answer", "left"), [("n", True), ("y", False)])
def test_clean_asks_at_a_terminal(tmp_path: Path, answer: str, left: bool) -> None:
    done = run(tmp_path, script="pass")
    ours, theirs = os.openpty()
    try:
        asked = subprocess.Popen(
            [sys.executable, "-m", "zlaunch", "ps", "run", "--clean"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.write(ours, f"{answer}\n".encode())
        shown, _ = asked.communicate(timeout=LIMIT_S)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "Remove the 1 run? [y/N]" in shown
    assert (done.run_dir.exists(), asked.returncode) == (left, 1 if left else 0)


@pytest.mark.rotated
def test_a_slurm_job_of_one_node_names_its_host(folder_of_one: Path) -> None:
    host = socket.gethostname()
    events = (folder_of_one / "run" / "events.jsonl").read_text()
    assert '"host":"localhost"' in events, "files keep the name that the logic needs"
    said = (folder_of_one / "err").read_text()
    assert f"worker.py on {host}: 1 " in said and f"rank 0 on {host} failed first" in said
    listed = zlaunch(folder_of_one, "ps", "--all", ".").stdout.split()
    ranks = zlaunch(folder_of_one, "ps", "run").stdout.splitlines()
    assert host in listed and any(line.split()[:2] == ["0", host] for line in ranks)
    watched = zlaunch(folder_of_one, "watch", "--once", "run").stdout
    assert zlaunch(folder_of_one, "report", "run").returncode == 0
    page = (folder_of_one / "run" / "report.html").read_text()
    for text in (said, *listed, *ranks, watched, page):
        assert "localhost" not in text


@pytest.fixture
def folder_of_one(tmp_path: Path) -> Path:
    """A failed run inside a SLURM job that has this machine alone."""
    job = {"JOB_ID": "7", "JOB_NODELIST": socket.gethostname(), "JOB_NUM_NODES": "1", "NTASKS": "1"}
    env = {f"SLURM_{name}": value for name, value in job.items()}
    launch = Launch(tmp_path, "--num_gpus=1", script="raise ValueError('no')", env=env)
    assert launch.wait() == 1
    return tmp_path
