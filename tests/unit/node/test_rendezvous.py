"""Test what a new agent says about the remains of one that has died."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from zlaunch.node.rendezvous import Handshake
from zlaunch.system.messages import AgentEvent, Sweep, Swept
from zlaunch.system.processes import pid_namespace, start_ticks

HIDDEN = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def swept(sessions: list[Any], namespace: int | None = None) -> AgentEvent:
    said: list[AgentEvent] = []
    namespace = pid_namespace() if namespace is None else namespace
    command = Sweep("of-no-process", sessions, namespace)
    Handshake(said.append, lambda fd, handler: None).handle(command)
    (answer,) = said
    return answer


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    """A worker that has changed its environment: only its session tells that it is the run's."""
    process = subprocess.Popen(
        [sys.executable, "-c", HIDDEN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_workers_are_found_by_their_session_and_ended(worker: subprocess.Popen[str]) -> None:
    sessions = [[worker.pid, start_ticks(worker.pid)]]
    assert swept(sessions) == Swept(1, True)
    assert worker.wait() == -9


def test_another_process_with_that_id_is_left_alone(worker: subprocess.Popen[str]) -> None:
    assert swept([[worker.pid, (start_ticks(worker.pid) or 0) - 1]]) == Swept(0, True)
    assert worker.poll() is None


@pytest.mark.parametrize("namespace", [0, 1])
def test_nothing_is_certain_about_processes_that_cannot_be_seen_from_here(
    worker: subprocess.Popen[str], namespace: int
) -> None:
    sessions = [[worker.pid, start_ticks(worker.pid)]]
    assert swept(sessions, namespace) == Swept(0, False)
    assert worker.poll() is None
