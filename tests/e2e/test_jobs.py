"""Test functions that are launched from Python: zlaunch.launch and the job that it returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, alive, exists
from tests.limits import LIMIT_S, wait_until

BEGIN = """
import os, sys, threading, time
import zlaunch

class Unsendable(Exception):
    def __init__(self, lock):
        super().__init__("cannot be sent")
        self.lock = lock

def work(what, path=None):
    rank = int(os.environ["RANK"])
    print("rank", rank, what, flush=True)
    if what == "wait":
        while not os.path.exists(path):
            time.sleep(0.02)
    if what == "raise" and rank == 1:
        raise KeyError("a key")
    if what == "raise":
        time.sleep(3600)
    if what == "odd":
        raise Unsendable(threading.Lock())
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "exit":
        sys.exit(0)
    return rank, what

def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("nothing was raised")
"""


def python(folder: Path, code: str) -> str:
    """Run a program; give what it prints."""
    (folder / "program.py").write_text(BEGIN + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rotated
def test_results_and_failures_arrive_here(tmp_path: Path) -> None:
    python(
        tmp_path,
        """
        jobs = [zlaunch.launch(work, what, num_gpus=2) for what in ("fine", "raise", "odd", "die", "exit")]
        fine, failed, odd, died, left = jobs
        assert fine.result() == [(0, "fine"), (1, "fine")] and fine.exception() is None
        assert fine.done() and not fine.running() and not fine.cancel()
        assert "rank 1 fine" in fine.logs(rank=1)
        error = raises(KeyError, failed.result)
        assert error.args == ("a key",) and "rank 1 of " in str(error.__cause__), error.__cause__
        assert 'raise KeyError("a key")' in str(error.__cause__)
        error = raises(zlaunch.JobFailedError, odd.result)
        assert "cannot be sent" in str(error)
        error = raises(RuntimeError, died.result)
        assert "exit code 137" in str(error) and "SIGKILL" in str(error), error
        error = raises(zlaunch.JobFailedError, left.result)
        assert "rank 0 has left no result" in str(error), error
        job = zlaunch.launch(work, "fine", options=["--include=no:0"])
        error = raises(zlaunch.JobFailedError, job.result)
        assert "unknown host" in str(error), error
        for option in ("--detach", "--dry-run"):
            raises(zlaunch.LaunchError, lambda: zlaunch.launch(work, "fine", options=[option]))
        raises(TypeError, lambda: zlaunch.launch(work, threading.Lock()))
        raises(zlaunch.LaunchError, lambda: zlaunch.launch(work, "fine", options=["--nothing"], detach=True))
        raises(zlaunch.LaunchError, lambda: zlaunch.FunctionJob("."))
        """,
    )


@pytest.mark.exhaustive
def test_the_last_attempt_counts_and_forked_children_launch_too(tmp_path: Path) -> None:
    python(
        tmp_path,
        """
        def changing():
            first = os.environ["ZLAUNCH_RESTART_COUNT"] == "0"
            if (os.environ["RANK"] == "1") == first:
                time.sleep(0.5)  # so that the other one has left its result
                raise ValueError("the first") if first else KeyError("the second")

        raises(KeyError, zlaunch.launch(changing, num_gpus=2, options=["--max_restarts=1"]).result)
        if not (child := os.fork()):
            job = zlaunch.launch(work, "wait", path="go")
            again = zlaunch.FunctionJob(job.folder)
            assert not again.done()
            open("go", "w").close()
            assert job.result() == again.result() == [(0, "wait")]
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )


def test_a_job_is_waited_for_cancelled_and_started_from_a_thread(tmp_path: Path) -> None:
    python(
        tmp_path,
        """
        found = []
        thread = threading.Thread(target=lambda: found.append(zlaunch.launch(work, "wait", path="go")))
        thread.start()
        thread.join()
        [job] = found
        other = zlaunch.launch(work, "wait", path="never")
        for each in (job, other):
            while "wait" not in each.logs():
                time.sleep(0.05)
        raises(TimeoutError, lambda: job.result(timeout=0.1))
        assert job.running() and not job.done()
        if not (child := os.fork()):
            os._exit(job.done())  # the launcher is no child of this process
        assert os.waitpid(child, 0)[1] == 0
        assert other.cancel() and other.done()
        assert "exit code 143" in str(raises(zlaunch.JobFailedError, other.result))
        open("go", "w").close()
        assert job.result() == [(0, "wait")]
        """,
    )


@pytest.mark.rotated
def test_a_detached_or_queued_job_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    names = python(
        tmp_path,
        """
        for more in ({"detach": True}, {"queue": "local"}, {"queue": "local"}):
            print(zlaunch.launch(work, "wait", path="go", hostfile="hosts", **more).name)
        """,
    ).split()
    said = python(
        tmp_path,
        f"""
        detached, queued, last = (zlaunch.FunctionJob("runs/" + name) for name in {names})
        while "wait" not in queued.logs():
            time.sleep(0.05)
        assert queued.running() and not last.running() and not last.done()
        assert last.cancel()
        assert "exit code 143" in str(raises(zlaunch.JobFailedError, last.result))
        open("go", "w").close()
        print(detached.result(), queued.result())
        """,
    )
    assert said == "[(0, 'wait')] [(0, 'wait')]\n"


def test_a_job_ends_with_its_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        BEGIN
        + textwrap.dedent("""
            job = zlaunch.launch(work, "wait", path="never")
            while "wait" not in job.logs():
                time.sleep(0.05)
            print(job.name, flush=True)
            time.sleep(3600)
            """)
    )
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert alive(name)
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    process.stdout.close()
    wait_until(lambda: not alive(name), "the job has ended")
    assert not exists(process.pid)
