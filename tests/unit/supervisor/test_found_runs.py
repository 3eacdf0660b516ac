"""Test how a run stands by its record and its folder's lock, after a reboot and from another container."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zlaunch.supervisor import run_record
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.supervisor.run_folder import make_run_dir


def found(folder: Path, **changed: object) -> FoundRun:
    """Return a run of this process, with a changed record."""
    run_record.begun(str(folder), "run", ["localhost"], 1)
    path = folder / "launcher.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    record = run_record.read(folder)
    assert record is not None
    return FoundRun("run", folder, record)


def test_a_run_whose_launcher_lives_runs(tmp_path: Path) -> None:
    assert found(tmp_path).state == "running"
    assert found(tmp_path, start_ticks=1).state == "gone"


def test_a_process_of_another_boot_is_another_one(tmp_path: Path) -> None:
    assert found(tmp_path, boot="another").state == "gone"


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_in_another_pid_namespace_is_known_by_its_lock(tmp_path: Path, shared: bool) -> None:
    elsewhere = {"pid_namespace": 1, "pid": 1, "start_ticks": 1}  # a container of this host
    lock = make_run_dir(tmp_path, shared=shared)
    assert lock is not None
    assert found(tmp_path, **elsewhere).state == "running"
    os.close(lock)
    assert found(tmp_path, **elsewhere).state == "gone"
    assert found(tmp_path, pid_namespace=1).state == "gone", "the process with its id here is another one"


def test_launchers_that_share_a_folder_do_not_keep_each_other_out(tmp_path: Path) -> None:
    locks = [make_run_dir(tmp_path, shared=True) for _ in range(2)]
    for lock in locks:
        assert lock is not None
        os.close(lock)


def test_the_record_of_a_later_version_is_read(tmp_path: Path) -> None:
    assert found(tmp_path, something_new=7).state == "running"
