"""Test what commands say about the end of a run: its cause beside its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch
from tests.limits import LIMIT_S, wait_until
from tests.ports import reserved_port

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
SIGNALS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"


def zlaunch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zlaunch", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize(
    ("script", "stops", "cause", "words"),
    [(SIGNALS_ITSELF, False, "failed", "failed"), (SLEEPS, True, "stopped", "stopped by SIGTERM")],
)
def test_a_signal_of_the_user_and_one_of_nobody_are_told_apart(
    tmp_path: Path, script: str, stops: bool, cause: str, words: str
) -> None:
    launch = Launch(
        tmp_path, "--num_gpus=1", "--no_local_rank", script=script, env={"PYTHONWARNINGS": "error"}
    )
    if stops:
        wait_until(lambda: "ready" in launch.out, "the worker")
        launch.process.terminate()
    assert launch.wait() == 143, launch.err
    assert "Warning" not in launch.err, "pipes are closed"
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    assert (record["exit_code"], record["cause"], record["bad_hosts"]) == (143, cause, [])
    assert f"ended 143 ({words})" in zlaunch(tmp_path, "ps", "--all", ".").stdout
    waited = zlaunch(tmp_path, "wait", "run")
    assert waited.returncode == 143 and f"run: {words} (exit code 143)" in waited.stderr
    assert ("run: rank 0 on localhost: SIGTERM" in waited.stderr) == (cause == "failed"), waited.stderr


def test_a_killed_launcher_leaves_no_exit_code_and_ps_and_wait_say_so(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", "--no_local_rank", script=SLEEPS)
    wait_until(lambda: "ready" in launch.out, "the worker")
    launch.process.kill()
    launch.wait()
    assert " gone " in zlaunch(tmp_path, "ps", "--all", ".").stdout
    waited = zlaunch(tmp_path, "wait", "run")
    assert waited.returncode == 1 and "the launcher was killed and wrote no exit code" in waited.stderr


IGNORES = """
import signal, time
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_second_signal_ends_a_run_at_once_and_its_record_says_so(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", "--no_local_rank", "--grace=60", script=IGNORES)
    wait_until(lambda: "ready" in launch.out, "the worker")
    launch.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping the workers (up to 60 s)" in launch.err, "the first answer")
    time.sleep(0.4)  # within 0.3 s it is taken for the same signal, to the group
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    assert (record["exit_code"], record["cause"]) == (130, "stopped")
    assert zlaunch(tmp_path, "wait", "run").returncode == 130


FILLS = """
import sys, time
for _ in range(4000):
    print("x" * 100)
"""


@pytest.mark.needs("root", "mounts")
def test_a_full_disk_hides_no_end(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path / "small")]
    subprocess.run(mounted, check=True)
    try:
        (tmp_path / "fills.py").write_text(FILLS)
        options = ("--num_gpus=1", "--no_local_rank", "--run_dir=small/run", "fills.py")
        done = zlaunch(tmp_path, *options)
        assert done.returncode == 0 and "No space left on device" in done.stderr, done.stderr
        assert zlaunch(tmp_path, "wait", "small/run").returncode == 0
        assert "ended 0" in zlaunch(tmp_path, "ps", "--all", "small").stdout
        with open("/dev/full", "w") as full:
            shown = subprocess.run(
                [sys.executable, "-m", "zlaunch", "logs", "small/run"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
            )
        assert shown.returncode == 1 and "cannot write to stdout" in shown.stderr
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def test_hosts_that_refuse_are_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.9 slots=1\n")
    with reserved_port() as port:
        options = ("--hostfile=hosts", "--launcher=ssh", f"--ssh_port={port}")
        launch = Launch(tmp_path, *options, script="pass")
        assert launch.wait() == 2, launch.err
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    assert (record["exit_code"], record["cause"], record["bad_hosts"]) == (2, "host refused", ["127.0.0.9"])
    assert "connection refused" in launch.err
