"""Test that processes are found and signalled by id and start alone, never by an id that was given again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.limits import LIMIT_S, wait_until
from zlaunch.system import processes as module
from zlaunch.system.processes import (
    Process,
    is_stopped,
    kill,
    kill_leftovers,
    run_processes,
    signal_groups,
    signal_name,
    start_ticks,
)

Popen = subprocess.Popen[bytes]
CHILD_LEFT_BEHIND = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"


@pytest.fixture
def sleeper() -> Iterator[Popen]:
    """A process of somebody, in a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def named(process: Popen) -> Process:
    ticks = start_ticks(process.pid)
    assert ticks is not None
    return Process(process.pid, ticks)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_process_with_a_recycled_id_is_not_killed(
    sleeper: Popen, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is there but was started at another time than the one that is meant is a stranger."""
    sent: list[int] = []
    real_pidfd, real_kill = signal.pidfd_send_signal, os.kill

    def send_by_pidfd(fd: int, signum: int) -> None:
        sent.append(signum)
        real_pidfd(fd, signum)

    def send(pid: int, signum: int) -> None:
        sent.append(signum)
        real_kill(pid, signum)

    monkeypatch.setattr(signal, "pidfd_send_signal", send_by_pidfd)
    monkeypatch.setattr(os, "kill", send)
    if not has_pidfd:
        monkeypatch.setattr(module, "open_pidfd", lambda pid: None)
    now = named(sleeper)
    for other in (now.start_ticks - 1, 0, now.start_ticks + 1):
        kill(Process(now.pid, other))
    assert sent == []
    kill(now)
    assert sent == [signal.SIGKILL] and sleeper.wait(LIMIT_S) == -signal.SIGKILL


def test_a_process_that_is_gone_is_passed_over(sleeper: Popen) -> None:
    gone = named(sleeper)
    sleeper.kill()
    sleeper.wait()
    kill(gone)
    assert start_ticks(gone.pid) is None and not is_stopped(gone)


def test_a_session_is_the_run_s_only_while_its_leader_is_the_run_s(sleeper: Popen) -> None:
    now = named(sleeper)
    assert run_processes(sessions=[now]) == [now]
    assert run_processes(sessions=[Process(now.pid, now.start_ticks - 1)]) == []


def test_what_a_leader_that_has_ended_left_in_its_session_is_found() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-S", "-c", CHILD_LEFT_BEHIND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    left = int(leader.stdout.readline())
    session = named(leader)
    try:
        assert {process.pid for process in run_processes(sessions=[session])} == {leader.pid, left}
        leader.kill()
        leader.wait()
        assert [process.pid for process in run_processes(sessions=[session])] == [left]
    finally:
        os.kill(left, signal.SIGKILL)
        leader.communicate()


def test_a_run_s_processes_are_told_by_their_whole_id() -> None:
    """The id "run-1" is also the beginning of "run-10", and the end of "other-run-1"."""
    ids = ("run-1", "run-10", "other-run-1")
    started = {
        name: subprocess.Popen(["sleep", "600"], env={**os.environ, "ZLAUNCH_RUN_ID": name}) for name in ids
    }
    try:
        for name, process in started.items():
            # between its fork and its exec a process has our own environment
            wait_until(lambda name=name: run_processes(name), "the process has its environment")  # type: ignore[misc]
            assert run_processes(name) == [named(process)]
            assert run_processes(name, spared=[process.pid]) == []
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_descendants_count_but_for_those_spared_and_this_process(sleeper: Popen) -> None:
    now = named(sleeper)
    assert now in run_processes(ancestor=os.getpid())
    assert now not in run_processes(ancestor=os.getpid(), spared=[now.pid])
    assert os.getpid() not in {process.pid for process in run_processes(ancestor=os.getppid())}
    assert now not in run_processes(ancestor=os.getppid(), spared=[os.getpid()]), "a spared one's child"


def test_a_sweep_counts_each_process_once_and_looks_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that forks faster than it is killed shows in a later scan, after one that saw nothing."""
    scans = iter([[Process(5, 1)], [Process(5, 1)], [], [Process(6, 1)], [], []])
    killed: list[Process] = []
    monkeypatch.setattr(module, "run_processes", lambda *_, **__: next(scans))
    monkeypatch.setattr(module, "kill", killed.append)
    monkeypatch.setattr(module, "_SCAN_PAUSE_S", 0.0)
    assert kill_leftovers("id") == 2
    assert killed == [Process(5, 1), Process(5, 1), Process(6, 1)] and next(scans, None) is None


def test_groups_that_are_gone_are_passed_over(sleeper: Popen) -> None:
    signal_groups([2**22 + 1, sleeper.pid], signal.SIGTERM)
    assert sleeper.wait(LIMIT_S) == -signal.SIGTERM


def test_names_of_signals() -> None:
    assert (signal_name(9), signal_name(200)) == ("SIGKILL", "signal 200")
