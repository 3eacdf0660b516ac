"""Test the watchdog: a frozen agent whose launcher is gone, what an agent leaves, and how it ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT_S, wait_until
from zlaunch.node import watchdog as module
from zlaunch.system.processes import Process, is_stopped, start_ticks

AGENT = """
import os, signal, subprocess, sys
from zlaunch.node.watchdog import fork_under_watchdog
fork_under_watchdog()
left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(os.getpid(), left.pid, flush=True)
sys.stdin.read()
CODE
"""


class Agent:
    """An agent that ends as soon as its launcher hangs up, under its watchdog."""

    def __init__(self, code: str = "os._exit(7)") -> None:
        self.watchdog = subprocess.Popen(
            [sys.executable, "-c", AGENT.replace("CODE", code)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.watchdog.stdout is not None and self.watchdog.stdin is not None
        self.launcher = self.watchdog.stdin
        pids = [int(pid) for pid in self.watchdog.stdout.readline().split()]
        self.process, self.left = (Process(pid, start_ticks(pid) or 0) for pid in pids)
        name = Path(f"/proc/{self.watchdog.pid}/cmdline")
        wait_until(lambda: name.read_bytes().startswith(b"zwatchdog"), "the watchdog handles signals")

    def wait(self) -> int:
        """How the watchdog ended, once nothing is left."""
        code = self.watchdog.wait(LIMIT_S)
        assert self.watchdog.stdout is not None
        self.watchdog.stdout.close()
        for process in (self.process, self.left):
            assert start_ticks(process.pid) != process.start_ticks
        return code


def test_a_frozen_agent_whose_launcher_is_gone_is_woken_and_ends() -> None:
    agent = Agent()
    os.kill(agent.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(agent.process), "the agent is frozen")
    agent.launcher.close()
    assert agent.wait() == 7


def test_a_signal_to_the_watchdog_goes_to_the_agent_and_is_how_both_end() -> None:
    agent = Agent()
    agent.watchdog.terminate()
    assert agent.wait() == -signal.SIGTERM
    agent.launcher.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_agent_leaves_nothing_and_its_watchdog_ends_as_it_did(signum: int) -> None:
    agent = Agent()
    for ignored in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        agent.watchdog.send_signal(ignored)  # of a terminal, or to all of a run
    os.kill(agent.process.pid, signum)
    assert agent.wait() == -signum
    agent.launcher.close()


class Poller:
    """What poll returns in each round; the descriptors are those that were registered, in their order."""

    def __init__(self, *rounds: tuple[int, ...]) -> None:
        self.rounds, self.fds = list(rounds), list[int]()
        self.left: list[int] = []
        self.timeouts: list[int | None] = []

    def register(self, fd: int, events: int) -> None:
        self.fds.append(fd)

    def unregister(self, fd: int) -> None:
        self.left.append(fd)

    def poll(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        self.timeouts.append(timeout_ms)
        return [(self.fds[index], select.POLLHUP) for index in self.rounds.pop(0)]


def watched(
    monkeypatch: pytest.MonkeyPatch, stopped: list[bool], *rounds: tuple[int, ...]
) -> tuple[Poller, list[tuple[Process, int]]]:
    """Watch over an agent that is stopped or not each time that one looks; return what was done."""
    poller, sent, agent = Poller(*rounds), [], Process(5, 6)
    launcher = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(module, "open_pidfd", lambda pid: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(module, "is_stopped", lambda process: stopped.pop(0))
    monkeypatch.setattr(module, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(select, "poll", lambda: poller)
    any_module: Any = module
    any_module._await_end(agent, launcher)
    os.close(launcher)
    return poller, sent


def test_nobody_looks_at_an_agent_whose_launcher_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever freezes an agent with its launcher, such as with Ctrl-Z, wants both to stand still."""
    poller, sent = watched(monkeypatch, [], (0,))
    assert poller.timeouts == [None] and sent == []


def test_an_agent_is_looked_at_again_and_again_once_its_launcher_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poller, sent = watched(monkeypatch, [False, True, True], (1,), (), (), (0,))
    assert sent == [(Process(5, 6), signal.SIGCONT)] * 2
    assert poller.timeouts == [None, *[module._LOOK_MS] * 3]
    assert poller.left == [poller.fds[1]], "a hang-up that stays is not reported for ever"
