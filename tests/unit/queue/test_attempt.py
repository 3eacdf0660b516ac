"""Test what the files of an attempt say."""

from __future__ import annotations

import os
from pathlib import Path

from zlaunch.queue.daemon import Attempt, forget
from zlaunch.supervisor.end import End
from zlaunch.system.processes import start_ticks


def test_what_has_become_of_an_attempt_is_known(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 7, 2)
    assert attempt.standing() == ("not begun", None) and attempt.process() is None
    lock = attempt.lock()
    assert lock is not None and attempt.lock() is None
    assert attempt.standing() == ("alive", None)
    attempt.begin()
    assert attempt.standing() == ("alive", None)
    assert attempt.process() == (os.getpid(), start_ticks(os.getpid()))
    copy = os.dup(lock)  # as a process that was forked has it
    os.close(lock)
    assert attempt.standing() == ("alive", None)
    os.close(copy)
    assert attempt.standing() == ("lost", None)
    attempt.end(End(7, "host refused", ("n1",)))
    assert attempt.standing() == ("ended", End(7, "host refused", ("n1",)))
    assert Attempt(tmp_path, 7, 3).standing() == ("not begun", None)
    assert Attempt(tmp_path, 77, 2).standing() == ("not begun", None)
    forget(tmp_path, 7)
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["77.2.lock"]
