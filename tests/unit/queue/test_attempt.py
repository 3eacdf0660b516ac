"""Test what the files of an attempt say."""

from __future__ import annotations

import os
from pathlib import Path

from zlaunch.queue.daemon import Attempt, forget
from zlaunch.supervisor.end import End
from zlaunch.system.processes import start_ticks


def test_what_has_become_of_an_attempt_is_known(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7, 2)
    assert attempt.status() == ("not begun", None) and attempt.process() is None
    lock = attempt.lock()
    assert lock is not None and attempt.lock() is None
    assert attempt.status() == ("alive", None)
    attempt.begin()
    assert attempt.status() == ("alive", None)
    assert attempt.process() == (os.getpid(), start_ticks(os.getpid()))
    copy = os.dup(lock)  # as a process that was forked has it
    os.close(lock)
    assert attempt.status() == ("alive", None)
    os.close(copy)
    assert attempt.status() == ("lost", None)
    attempt.end(End(7, "host refused", ("n1",)))
    assert attempt.status() == ("ended", End(7, "host refused", ("n1",)))
    assert Attempt(tmp_path, 7, 3).status() == ("not begun", None)
    assert Attempt(tmp_path, 77, 2).status() == ("not begun", None)
    forget(tmp_path, 7)
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["77.2.lock"]
