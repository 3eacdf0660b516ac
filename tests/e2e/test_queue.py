"""Test the queue with real runs: `submit`, `queue`, `cancel`, and a daemon that is killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, alive
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, MATRIX_LIMIT_S, wait_until
from tests.queue_drills import daemons_of
from zlaunch.queue.daemon import LOG, queue_folder

SCRIPT = """
    import os, sys, time
    run = os.environ["ZLAUNCH_RUN_ID"]
    def note(what):
        with open("log", "a") as file:
            file.write(f"{run} {what} {os.environ['RANK']} {time.time()}\\n")
    note("begun")
    seconds, code = float(sys.argv[1]), int(sys.argv[2])
    end = time.time() + seconds
    while time.time() < end and not os.path.exists("go"):
        time.sleep(0.02)
    note("done")
    sys.exit(code)
"""
FOR_EVER = "3600"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, six slots, and a queue of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "hosts").write_text("localhost slots=6\n")
    return tmp_path


OPTIONS = ("submit", "--queue=local", "--hostfile=hosts", "--no_local_rank")


def submit(folder: Path, *arguments: str) -> str:
    """Submit; give the run's name."""
    done = zlaunch(folder, *OPTIONS, *arguments)
    assert done.returncode == 0, done.stderr
    assert "of the queue" in done.stderr
    return done.stdout.strip()


def queue(folder: Path) -> dict[str, dict[str, Any]]:
    """The jobs of the queue, by run."""
    done = zlaunch(folder, "queue", "--queue=local", "--all", "--json")
    assert done.returncode == 0, done.stderr
    return {job["run"]: job for job in json.loads(done.stdout)}


def has_begun(folder: Path, run: str, rank: str = "") -> bool:
    return (folder / "log").exists() and f"{run} begun {rank}" in (folder / "log").read_text()


def daemons() -> list[int]:
    """The living daemons of the queue whose folder the environment names."""
    return daemons_of(os.environ["XDG_STATE_HOME"])


@pytest.mark.rotated
def test_runs_wait_for_slots_and_for_each_other(folder: Path) -> None:
    first = submit(folder, "--num_gpus=4", "train.py", FOR_EVER, "0")
    second = submit(folder, "--num_gpus=4", "train.py", FOR_EVER, "7")
    third = submit(folder, "--num_gpus=2", "--after=2", "train.py", FOR_EVER, "0")
    small = submit(folder, "--num_gpus=2", "--name=small", "--tag=a", "train.py", FOR_EVER, "0")
    wait_until(lambda: has_begun(folder, first), "the first run")
    # the second one waits for slots of the first: two are free, which are no use to it but spoken for
    jobs = queue(folder)
    assert [jobs[run]["state"] for run in (first, second, third, small)] == ["running", *["waiting"] * 3]
    listed = json.loads(zlaunch(folder, "ps", "--json").stdout)
    assert {run["run"]: run["state"] for run in listed} == {
        first: "running",
        **dict.fromkeys((second, third, small), "queued"),
    }
    shown = " ".join(zlaunch(folder, "queue", "--queue=local").stdout.split())
    assert "for 4 slots" in shown and "after" in shown and "for 2 slots" in shown
    early = zlaunch(folder, "wait", "small", "--timeout=0.1")
    assert early.returncode == 124
    stopped = zlaunch(folder, "stop", small)
    assert stopped.returncode == 2 and f"zlaunch cancel {small}" in stopped.stderr
    (folder / "go").touch()
    assert zlaunch(folder, "wait", second).returncode == 7
    assert zlaunch(folder, "wait", first).returncode == 0
    refused = zlaunch(folder, "wait", third)
    assert refused.returncode == 1 and f"not started: {second} has not ended well (exit" in refused.stderr
    assert f"(not started: {second} has not ended well)" in zlaunch(folder, "ps", "--all").stdout
    assert zlaunch(folder, "wait", small).returncode == 0
    record = json.loads((folder / "runs" / small / "launcher.json").read_text())
    assert (record["exit_code"], record["name"], record["tags"]) == (0, "small", ["a"])
    jobs = queue(folder)
    assert jobs[third]["why"] == f"not started: {second} has not ended well"
    assert not has_begun(folder, third)
    text = zlaunch(folder, "queue", "--queue=local", "--all").stdout
    assert "ended 7" in text and "localhost:0,1,2,3" in text
    wait_until(lambda: not daemons(), "the daemon has ended by itself")
    assert zlaunch(folder, "queue", "--queue=local").stdout.startswith("nothing waits or runs in the queue")


@pytest.mark.rotated
def test_cancelled_stopped_late_and_tried_again(folder: Path) -> None:
    running = submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")
    waiting = submit(folder, "--num_gpus=1", "train.py", "0", "0")
    wait_until(lambda: has_begun(folder, running), "the run")
    job = str(queue(folder)[waiting]["id"])
    done = zlaunch(folder, "cancel", "--queue=local", job)
    assert done.returncode == 0 and done.stdout == f"job {job}: cancelled\n"
    assert zlaunch(folder, "wait", waiting).returncode == 128 + signal.SIGTERM
    assert zlaunch(folder, "cancel", "--queue=local", running).returncode == 0
    assert zlaunch(folder, "wait", running).returncode == 128 + signal.SIGTERM
    again = zlaunch(folder, "cancel", "--queue=local", job)
    assert again.returncode == 2 and f"job {job} has already ended" in again.stderr
    assert not has_begun(folder, waiting)
    # a time limit; a failure that is tried again, in the same folder
    late = submit(folder, "--num_gpus=1", "--time=0:0:1", "train.py", FOR_EVER, "0")
    failing = submit(folder, "--num_gpus=1", "--retries=2", "train.py", "0", "9")
    assert zlaunch(folder, "wait", failing).returncode == 9
    assert (folder / "log").read_text().count(f"{failing} begun") == 3
    assert zlaunch(folder, "wait", late).returncode == 128 + signal.SIGTERM
    jobs = queue(folder)
    assert jobs[late]["why"] == "time limit of 1 s" and jobs[failing]["why"] == "exit code 9"
    assert zlaunch(folder, "ps", "--clean", "--yes").returncode == 0
    assert not (folder / "runs").exists()


@pytest.mark.exhaustive
def test_a_higher_priority_makes_room(folder: Path) -> None:
    (folder / "saves.py").write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            def save(*_):
                open("saved", "w").close()
                sys.exit(75)
            signal.signal(signal.SIGUSR1, save)
            with open("attempts", "a") as file:
                file.write(os.environ["ZLAUNCH_RESTART_COUNT"])
            while not os.path.exists("saved"):
                time.sleep(0.02)
        """)
    )
    low = submit(folder, "--num_gpus=6", "--preemptible", "saves.py")
    attempts = folder / "attempts"
    wait_until(lambda: attempts.exists() and attempts.read_text() == "0" * 6, "the run of a low priority")
    high = submit(folder, "--num_gpus=2", "--priority=5", "train.py", "0", "0")
    assert zlaunch(folder, "wait", high).returncode == 0
    assert zlaunch(folder, "wait", low).returncode == 0
    assert (folder / "saved").exists()
    assert (folder / "attempts").read_text() == "0" * 6 + "1" * 6
    jobs = queue(folder)
    assert jobs[high]["ended"] < jobs[low]["started"]


@pytest.mark.exhaustive
def test_what_cannot_take_the_signal_yet_makes_room_too(folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    )
    low = submit(folder, "--num_gpus=6", "--preemptible", "slow.py")
    record = folder / "runs" / low / "launcher.json"
    wait_until(lambda: json.loads(record.read_text())["pid"], "the run of a low priority")
    high = submit(folder, "--num_gpus=2", "--priority=5", "train.py", "0", "0")
    assert zlaunch(folder, "wait", high).returncode == 0
    (folder / "go").touch()
    assert zlaunch(folder, "wait", low).returncode == 0
    assert queue(folder)[low]["attempt"] == 1


SURROUNDINGS = """
    import json, os, resource, sys
    about = {"python": sys.executable, "cwd": os.getcwd(), "nice": os.getpriority(os.PRIO_PROCESS, 0)}
    about["cpus"] = sorted(os.sched_getaffinity(0))
    about["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with open(sys.argv[1], "w") as file:
        json.dump(about, file)
"""


def second_venv(folder: Path) -> Path:
    """Make a virtual environment with another interpreter and the packages of this one; return its Python."""
    own, other = Path(sys.prefix), folder / "venv"
    (other / "bin").mkdir(parents=True)
    shutil.copy(own / "pyvenv.cfg", other)
    (other / "lib").symlink_to(own / "lib")
    (other / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return other / "bin" / "python"


@pytest.mark.exhaustive
def test_a_job_runs_as_it_was_submitted_whatever_the_daemon_is(folder: Path) -> None:
    """The first submitter's daemon runs the jobs of all others."""
    (folder / "about.py").write_text(textwrap.dedent(SURROUNDINGS))
    blocker = submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")
    wait_until(lambda: has_begun(folder, blocker), "the first submitter's run, and with it the daemon")
    python, cpu = second_venv(folder), sorted(os.sched_getaffinity(0))[-1]
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)
    become = textwrap.dedent(f"""
        import os, resource, sys
        os.setpriority(os.PRIO_PROCESS, 0, {own_nice + 1})
        os.sched_setaffinity(0, [{cpu}])
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        from zlaunch.cli.main import main
        sys.exit(main(sys.argv[1:]))
    """)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-c", become, *OPTIONS, "--num_gpus=1", "about.py", "second"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    second, third = done.stdout.strip(), submit(folder, "--num_gpus=1", "about.py", "third")
    (folder / "go").touch()
    for run in (second, third):
        assert zlaunch(folder, "wait", run).returncode == 0
    about = {name: json.loads((folder / name).read_text()) for name in ("second", "third")}
    assert about["second"]["python"] == str(python) and about["third"]["python"] == sys.executable
    assert (about["second"]["nice"], about["third"]["nice"]) == (own_nice + 1, own_nice)
    assert about["second"]["cpus"] == [cpu] and len(about["third"]["cpus"]) >= 1
    assert about["second"]["files"] == 300 != about["third"]["files"]


def test_whoever_waits_sees_the_end_without_daemon_and_launcher(folder: Path) -> None:
    """As after an OOM kill of both: nobody but the one who waits is there to see it."""
    run = submit(folder, "--num_gpus=1", "train.py", FOR_EVER, "0")
    wait_until(lambda: has_begun(folder, run), "the run")
    for pid in daemons():
        os.kill(pid, signal.SIGKILL)
    os.kill(json.loads((folder / "runs" / run / "launcher.json").read_text())["pid"], signal.SIGKILL)
    done = zlaunch(folder, "wait", run)
    assert done.returncode == 128 + signal.SIGKILL and "lost" in done.stderr
    [listed] = json.loads(zlaunch(folder, "ps", "--all", "--json").stdout)
    assert (listed["state"], listed["cause"]) == ("ended 137", "lost")
    assert not alive(run)


@pytest.mark.exhaustive
def test_a_row_of_another_version_harms_no_other(folder: Path) -> None:
    blocker = submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")
    wait_until(lambda: has_begun(folder, blocker), "the first run")
    foreign = submit(folder, "--num_gpus=1", "train.py", "0", "0")
    with closing(sqlite3.connect(queue_folder() / "jobs.sqlite")) as base, base:
        base.execute(
            "UPDATE jobs SET schema = 99, version = '9.9', submission = '{}' WHERE state = 'waiting'"
        )
    later = submit(folder, "--num_gpus=1", "train.py", "0", "0")
    for command in (("queue", "--queue=local"), ("ps",)):
        done = zlaunch(folder, *command)
        assert done.returncode == 0 and "zlaunch 9.9" in " ".join(done.stdout.split()), done
    (folder / "go").touch()
    assert zlaunch(folder, "wait", later).returncode == 0
    done = zlaunch(folder, "cancel", "--queue=local", "2")
    assert (done.returncode, done.stdout) == (0, "job 2: cancelled\n")
    assert zlaunch(folder, "wait", foreign).returncode == 128 + signal.SIGTERM


@pytest.mark.rotated
def test_a_job_is_queued_and_started_whoever_reads_its_name(folder: Path) -> None:
    command = [sys.executable, "-m", "zlaunch", *OPTIONS, "--run_dir=runs/job", "train.py", "0", "0"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == 0 and b"cannot write to stdout" in done.stderr, done
    # nobody looks into the queue, which would start its daemon
    wait_until(lambda: has_begun(folder, ""), "the job")
    assert zlaunch(folder, "wait", "runs/job").returncode == 0


@pytest.mark.exhaustive
def test_one_dead_host_does_not_eat_the_queue(folder: Path) -> None:
    """A job that meets the dead host fails within a second, and the next one would take its place there."""
    (folder / "hosts").write_text("nowhere.invalid slots=1\nlocalhost slots=1\n")
    where = ("--num_nodes=1", "--num_gpus=1", "--connect_timeout=5", "--retries=1")
    runs = [submit(folder, *where, "train.py", "0", "0") for _ in range(3)]
    codes = [zlaunch(folder, "wait", run).returncode for run in runs]
    assert codes == [0, 0, 0]
    log = (queue_folder() / LOG).read_text()
    assert log.count("nowhere.invalid rests for 30 s") == 1


_TWO_GPUS = """
    set -e
    mkdir dev
    mount -t tmpfs tmpfs dev
    for name in full null random urandom zero; do touch dev/$name; mount --bind /dev/$name dev/$name; done
    mkdir dev/shm
    mount --rbind /dev/shm dev/shm
    ln -s /proc/self/fd dev/fd
    touch dev/nvidia0 dev/nvidia1
    mount --rbind dev /dev
    exec "$@"
"""
_ON_ONE_OF_TWO = """
    import os, sys
    with open("log", "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] * (not sys.argv[1:]) + "\\n")
    if sys.argv[1:]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.environ["CUDA_VISIBLE_DEVICES"] in ("", "0"):
        raise RuntimeError("No CUDA GPUs are available")
"""


@pytest.mark.exhaustive
@pytest.mark.needs("root", "namespaces", "mounts")
def test_one_broken_gpu_does_not_rest_its_host(folder: Path) -> None:
    """The machine has two device files, and the script raises what torch raises where a GPU is broken."""
    (folder / "train.py").write_text(textwrap.dedent(_ON_ONE_OF_TWO))
    words = ["submit", "--queue=local", "--quiet", "--no_local_rank", "--no_preload"]
    words += ["--num_gpus=1", "--retries=1", "train.py"]
    text = f"""
from zlaunch.cli.main import main
own = [*{words[:-2]}, "--run_dir=runs/own", "train.py", "hides its GPU"]
assert main(own) == 0 and main(["wait", "runs/own"]) == 1
runs = [f"runs/{{number}}" for number in range(3)]
for run in runs:
    assert main([*{words[:-1]}, f"--run_dir={{run}}", "train.py"]) == 0
print("codes", *(main(["wait", run]) for run in runs))
"""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", textwrap.dedent(_TWO_GPUS), "sh", sys.executable, "-c", text],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "codes 0 0 0" in done.stdout, done
    assert sorted((folder / "log").read_text().split()) == ["0", "1", "1", "1"]
    log = (queue_folder() / LOG).read_text()
    assert log.count("localhost:0 rests for 30 s; it will be tried again") == log.count("rests") == 1
    shown = zlaunch(folder, "queue", "--queue=local", "--all").stdout
    assert "localhost:0 rests for" in shown


@pytest.mark.exhaustive  # the steps take half a minute; tests/unit/queue/test_daemon.py has them without it
def test_a_launcher_that_is_suspended_ends_when_it_is_cancelled(folder: Path) -> None:
    run = submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")
    wait_until(lambda: has_begun(folder, run), "the run")
    os.kill(json.loads((folder / "runs" / run / "launcher.json").read_text())["pid"], signal.SIGSTOP)
    done = zlaunch(folder, "cancel", "--queue=local", run)
    assert done.returncode == 0, done
    assert not alive(run) and queue(folder)[run]["cause"] == "stopped"


@pytest.mark.exhaustive
def test_a_launcher_that_is_killed_gives_its_slots_back_when_its_workers_are_gone(folder: Path) -> None:
    run = submit(folder, "--num_gpus=6", "--retries=1", "train.py", FOR_EVER, "0")
    after = submit(folder, "--num_gpus=1", "--priority=9", "train.py", "0", "0")
    wait_until(lambda: has_begun(folder, run, "0"), "the first rank of the run")
    record = folder / "runs" / run / "launcher.json"
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: has_begun(folder, after), "the next run")
    assert not alive(run), "its slots were given while it still had them"
    wait_until(
        lambda: (folder / "log").read_text().count(f"{run} begun 0") == 2,
        lambda: f"tried again: {queue(folder)[run]}",
    )
    (folder / "go").touch()
    assert zlaunch(folder, "wait", run).returncode == 0


@pytest.mark.exhaustive
def test_a_folder_that_is_removed_holds_up_nobody_and_gives_no_slot_twice(folder: Path) -> None:
    (folder / "often.py").write_text(
        "import os, time\nwith open('often', 'a') as file:\n    file.write('x')\n"
        "while not os.path.exists('go'):\n    time.sleep(0.02)\nraise SystemExit(1)\n"
    )
    first = submit(folder, "--num_gpus=6", "--max_restarts=1", "often.py")
    wait_until(lambda: (folder / "often").exists() and len((folder / "often").read_text()) == 6, "the run")
    second = submit(folder, "--num_gpus=6", "train.py", "0", "0")
    shutil.rmtree(folder / "runs" / first)
    time.sleep(1)  # the daemon has looked at it
    assert not has_begun(folder, second) and queue(folder)[first]["state"] == "running"
    (folder / "go").touch()
    assert zlaunch(folder, "wait", second).returncode == 0
    assert queue(folder)[first]["state"] == "ended"


@pytest.mark.exhaustive
def test_a_run_is_named_in_any_way(folder: Path) -> None:
    (folder / "elsewhere").symlink_to(folder)
    runs = [submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")]
    wait_until(lambda: has_begun(folder, runs[0]), "the first run")
    later = submit(folder, "--num_gpus=1", "--after=latest", "train.py", "0", "0")
    for path in (folder / "elsewhere" / "runs", Path("runs", "..", "runs")):
        runs.append(submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0"))
        done = zlaunch(folder, "cancel", "--queue=local", path / runs[-1])
        assert done.returncode == 0, done.stderr
    (folder / "go").touch()
    assert zlaunch(folder, "wait", later).returncode == 0
    done = zlaunch(folder, "cancel", "--queue=local", "9" * 20)
    assert done.returncode == 2 and "there is no job" in done.stderr


@pytest.mark.exhaustive
def test_a_daemon_whose_folder_is_removed_ends(folder: Path) -> None:
    run = submit(folder, "--num_gpus=1", "train.py", "0", "0")
    assert zlaunch(folder, "wait", run).returncode == 0
    assert daemons()
    (folder / "state").rename(folder / "away")
    wait_until(lambda: not daemons(), "the daemon has ended")


def test_a_run_that_never_came_into_the_queue_is_no_queued_one(folder: Path) -> None:
    lost = folder / "runs" / "lost"
    (lost / ".queue").mkdir(parents=True)
    (lost / ".queue" / "queued").touch()
    record = {"run_id": "lost", "host": os.uname().nodename, "pid": 0, "start_ticks": 0, "hosts": []}
    record |= {"world_size": 1, "command": ["x.py"], "started": 1.0}
    (lost / "launcher.json").write_text(json.dumps(record))
    assert zlaunch(folder, "wait", "lost").returncode == 1
    [listed] = json.loads(zlaunch(folder, "ps", "--all", "--json").stdout)
    assert listed["state"] == "ended 1"


@pytest.mark.exhaustive
def test_what_cannot_be_queued_is_refused(folder: Path) -> None:
    (folder / "unknown").write_text("localhost\n")
    for arguments, text in (
        (("--num_gpus=7", "train.py"), "localhost has 6 slots"),
        (("missing.py",), "missing.py"),
        (("--hostfile=unknown", "train.py"), "write slots=N after localhost"),
        (("--after=never", "train.py"), "no run 'never'"),
        (("--time=soon", "train.py"), "--time 'soon': write it as"),
        (("--detach", "train.py"), "No such option"),
        (("--sbatch=-p x", "train.py"), "--sbatch needs --queue slurm"),
        (("--requeue", "train.py"), "--preemptible and --retries"),
        (("--config=ds.json", "train.py"), "--config"),
    ):
        done = zlaunch(folder, *OPTIONS, *arguments)
        assert done.returncode == 2 and text in done.stderr, (arguments, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not queue(folder) and not (folder / "runs").exists()
    for job in ("5", "nothing"):
        done = zlaunch(folder, "cancel", "--queue=local", job)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.exhaustive
def test_a_folder_that_is_gone_ends_the_job_with_the_reason(folder: Path) -> None:
    blocker = submit(folder, "--num_gpus=6", "train.py", FOR_EVER, "0")
    other = folder / "other"
    other.mkdir()
    (other / "x.py").write_text("")
    (other / "hosts").write_text("localhost slots=6\n")
    done = zlaunch(other, *OPTIONS, f"--run_dir={folder}/run", "x.py")
    assert done.returncode == 0, done.stderr
    for path in (*other.iterdir(), other):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "go").touch()
    assert zlaunch(folder, "wait", blocker).returncode == 0
    assert zlaunch(folder, "wait", folder / "run").returncode == 1
    assert "not started: " in next(job["why"] for job in queue(folder).values() if "x.py" in job["command"])


def submit_many(folder: Path, count: int, seconds: str) -> None:
    """Submit equal runs from one process: what is tested is the queue."""
    arguments = [*OPTIONS, "--quiet", "--no_preload", "--num_gpus=1", "train.py", seconds, "0"]
    text = f"from zlaunch.cli.main import main\nfor i in range({count}): assert main({arguments}) == 0"
    subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        timeout=MATRIX_LIMIT_S,
        check=True,
    )


def await_all(folder: Path, limit_s: float = MATRIX_LIMIT_S) -> list[dict[str, Any]]:
    """Wait for the end of all jobs."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        jobs = list(queue(folder).values())
        if all(job["state"] == "ended" for job in jobs):
            return jobs
        time.sleep(1)
    raise AssertionError((Path(queue_folder(), LOG)).read_text()[-2000:])


def check_once(folder: Path, jobs: list[dict[str, Any]], count: int) -> None:
    """Check by what the scripts have written that each ran once, and no two at a time on one slot."""
    assert len(jobs) == count and {job["exit_code"] for job in jobs} == {0}
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    noted = Counter((run, what) for run, what, _, _ in lines)
    assert noted == Counter({(job["run"], what): 1 for job in jobs for what in ("begun", "done")})
    times = {(run, what): float(when) for run, what, _, when in lines}
    uses: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        run, slot = job["run"], str(job["slots"])
        uses.setdefault(slot, []).append((times[run, "begun"], times[run, "done"]))
    assert len(uses) == 6
    for spans in uses.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.exhaustive
def test_a_daemon_that_is_killed_loses_and_doubles_nothing(folder: Path) -> None:
    count, kills = 120, 50
    chance = random.Random(0)
    submit_many(folder, count, "1.0")
    killed = 0
    deadline = time.monotonic() + MATRIX_LIMIT_S
    while killed < kills and time.monotonic() < deadline:
        time.sleep(chance.uniform(0, 0.6))
        for pid in daemons():
            try:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        if (folder / "log").exists() and (folder / "log").read_text().count("done") > count - 12:
            submit_many(folder, 24, "1.0")  # a busy machine kills more slowly than runs end
            count += 24
        elif chance.random() < 0.5:  # else the next run that ends starts one
            zlaunch(folder, "queue", "--queue=local")
    assert killed >= kills
    check_once(folder, await_all(folder), count)
