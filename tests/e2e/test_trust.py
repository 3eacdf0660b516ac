"""Test commands and functions on folders that another user has made or can change."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zlaunch as package
from tests.e2e.helpers import Launch, run
from tests.e2e.test_runs import change_record, zlaunch
from zlaunch.errors import LaunchError
from zlaunch.system.processes import start_ticks

STRANGER = 65533

pytestmark = pytest.mark.needs("root")


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of a run that has ended."""
    launch = run(tmp_path, "--num_gpus=1", script="print('done')")
    assert launch.process.returncode == 0, launch.err
    return tmp_path / "run"


def test_a_forged_record_kills_nothing_and_removes_nothing(ended: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as victim:
        pid = victim.pid
        change_record(ended, pid=pid, start_ticks=start_ticks(pid), ended=None, exit_code=None, cause=None)
        give_away(ended)
        for command in (("stop", ended), ("stop", ended, "--signal=KILL"), ("stacks", ended)):
            done = zlaunch(tmp_path, *command)
            assert done.returncode == 2 and f"belongs to user {STRANGER}" in done.stderr, done.stderr
        assert victim.poll() is None
        victim.send_signal(signal.SIGKILL)
    target = tmp_path / "precious.log"
    target.write_text("keep me")
    change_record(ended, ended=1.0, exit_code=0)
    (ended / "logs" / "rank_00007.log").symlink_to(target)
    before = sorted(ended.rglob("*"))
    done = zlaunch(tmp_path, "ps", "--clean", "-y", ".")
    assert done.returncode == 0 and f"belongs to user {STRANGER}" in done.stdout, done.stdout
    assert sorted(ended.rglob("*")) == before and target.read_text() == "keep me"


def test_a_folder_of_another_user_takes_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    target = tmp_path / "precious.log"
    target.write_text("keep me")
    (tmp_path / "run" / "logs" / "rank_00000.log").symlink_to(target)
    give_away(tmp_path / "run")
    launch = Launch(tmp_path, "--num_gpus=1", script="print('started')")
    assert launch.wait() == 2 and f"belongs to user {STRANGER}; or use another folder" in launch.err
    assert target.read_text() == "keep me"


class _Payload:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_pickles_of_another_user_are_not_loaded(tmp_path: Path) -> None:
    call = tmp_path / "run" / "call"
    call.mkdir(parents=True)
    payload = pickle.dumps(_Payload(tmp_path / "ran"))
    for name in ("call.pkl", "result_0000_000000.pkl"):
        (call / name).write_bytes(payload)
    (call / "path.json").write_text("[]")
    (call / "job.json").write_text(json.dumps({"pid": None, "slurm": None}))
    give_away(tmp_path / "run")
    with pytest.raises(LaunchError, match=f"belongs to user {STRANGER}"):
        package.FunctionJob(tmp_path / "run")
    env = {**os.environ, "RANK": "0", "ZLAUNCH_RESTART_COUNT": "0"}
    worker = [sys.executable, "-m", "zlaunch.node.function_call", str(call)]
    done = subprocess.run(worker, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and f"belongs to user {STRANGER}" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_what_a_run_writes_is_for_its_user_alone(ended: Path) -> None:
    assert ended.stat().st_mode & 0o777 == 0o700
