"""Test `zlaunch logs` on real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, run
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, wait_until

LINES = """
    import os, sys
    rank = os.environ["RANK"]
    for line in range(3):
        print("line", line, "of", rank, flush=True)
    print("last of", rank, file=sys.stderr, flush=True)
"""
WAITING = """
    import os, time
    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("down", flush=True)
"""


def follow(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zlaunch", "logs", "-f", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.rotated
def test_a_run_that_has_ended(tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=2", script=LINES)
    everything = zlaunch(tmp_path, "logs", "run")
    assert everything.returncode == 0 and everything.stdout.splitlines() == [
        *(f"[rank 0] line {line} of 0" for line in range(3)),
        "[rank 0] last of 0",
        *(f"[rank 1] line {line} of 1" for line in range(3)),
        "[rank 1] last of 1",
    ]
    assert zlaunch(tmp_path, "logs", "run", "--rank", "1", "-n", "2").stdout == "line 2 of 1\nlast of 1\n"
    assert zlaunch(tmp_path, "logs", "-f", "run", "--rank=0", "--lines=1").stdout == "last of 0\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--rank", "2"], "--rank 2: there is no rank 2; the last is 0"),
        (["run", "--rank", "one"], "is not a rank"),
        (["nothing"], "no run 'nothing'"),
    ],
)
def test_mistakes(arguments: list[str], text: str, tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=1", script=LINES)
    done = zlaunch(tmp_path, "logs", *arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_no_runs(tmp_path: Path) -> None:
    done = zlaunch(tmp_path, "logs")
    assert done.returncode == 2 and "last: no runs in" in done.stderr


def test_following_to_the_end(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=2", script=WAITING)
    wait_until(lambda: any(tmp_path.glob("run/logs/rank_00001.log")), "logs")
    watcher = follow(tmp_path, "run")
    assert watcher.stdout is not None
    first = sorted(watcher.stdout.readline() for _ in range(2))
    assert first == ["[rank 0] up\n", "[rank 1] up\n"]
    (tmp_path / "go").touch()
    rest, errors = watcher.communicate(timeout=LIMIT_S)
    assert sorted(rest.splitlines()) == ["[rank 0] down", "[rank 1] down"]
    assert watcher.returncode == 0 and not errors
    assert launch.wait() == 0


def test_a_launcher_that_is_killed_ends_it(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", script=WAITING)
    wait_until(lambda: "up" in launch.out, "the rank is up")
    watcher = follow(tmp_path, "run")
    assert watcher.stdout is not None and watcher.stdout.readline() == "up\n"
    os.kill(launch.process.pid, signal.SIGKILL)
    watcher.communicate(timeout=LIMIT_S)
    assert watcher.returncode == 0


def test_a_run_that_restarts_is_followed(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        print("attempt", os.environ["ZLAUNCH_RESTART_COUNT"], flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        sys.exit(os.environ["ZLAUNCH_RESTART_COUNT"] == "0")
    """
    launch = Launch(tmp_path, "--num_gpus=1", "--max_restarts=1", script=script)
    wait_until(lambda: "attempt 0" in launch.out, "the rank is up")
    watcher = follow(tmp_path, "run")
    assert watcher.stdout is not None and watcher.stdout.readline() == "attempt 0\n"
    (tmp_path / "go").touch()
    rest, errors = watcher.communicate(timeout=LIMIT_S)
    assert "attempt 1" in rest.splitlines() and watcher.returncode == 0 and not errors
    assert launch.wait() == 0


def test_the_watcher_leaves_the_run_alone(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", script=WAITING)
    wait_until(lambda: "up" in launch.out, "the rank is up")
    watcher = follow(tmp_path, "run")
    assert watcher.stdout is not None and watcher.stdout.readline() == "up\n"
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=LIMIT_S)
    assert watcher.returncode == 130 and not errors.strip()
    (tmp_path / "go").touch()
    gone = subprocess.run(
        f"{sys.executable} -m zlaunch logs -f run | head -n 1",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=True,
    )
    assert gone.stdout == b"up\n"
    assert launch.wait() == 0
