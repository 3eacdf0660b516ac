"""Test who may use a run's folder."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_folder import is_locked, make_run_dir


def test_a_folder_has_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_ENDING_S", 0.0)
    lock = make_run_dir(tmp_path)
    assert lock is not None and is_locked(tmp_path)
    with pytest.raises(LaunchError, match="another launch has just started there"):
        make_run_dir(tmp_path)
    os.close(lock)
    assert not is_locked(tmp_path)


def test_a_launch_waits_for_one_that_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue may start an attempt before the former launcher has let go of the run's folder."""
    monkeypatch.setattr(run_folder, "_ENDING_S", 60.0)
    held = make_run_dir(tmp_path)
    assert held is not None
    tried = threading.Event()
    pause = time.sleep

    def sleep(seconds: float) -> None:
        tried.set()
        pause(seconds)

    monkeypatch.setattr("time.sleep", sleep)

    def end() -> None:
        tried.wait()
        os.close(held)

    ending = threading.Thread(target=end)
    ending.start()
    lock = make_run_dir(tmp_path)
    ending.join()
    assert lock is not None and tried.is_set()
    os.close(lock)
