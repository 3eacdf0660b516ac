"""Test when a node counts as silent, with a clock that the test moves."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from zlaunch.supervisor import heartbeat as module
from zlaunch.supervisor.heartbeat import Heartbeat


class Scene:
    """A heartbeat of one node, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.heartbeat = Heartbeat([None], 60.0, queue.SimpleQueue())  # type: ignore[list-item]  # it sends nothing


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_was_heard_ends_the_silence(scene: Scene) -> None:
    scene.now += 50
    assert scene.heartbeat.silence_s(0) == 50
    scene.heartbeat.heard(0)
    assert scene.heartbeat.silence_s(0) == 0


def test_time_in_which_nobody_listened_is_no_silence(scene: Scene) -> None:
    """While the console takes nothing, a node's answers wait behind its output."""
    with scene.heartbeat.excused(0):
        scene.now += 500
    assert scene.heartbeat.silence_s(0) == 0


def test_a_process_that_stood_still_counts_anew(scene: Scene) -> None:
    scene.heartbeat.pause()
    scene.now += 500
    scene.heartbeat.forgive()
    assert scene.heartbeat.silence_s(0) == 0


def test_one_answer_a_minute_is_noted(scene: Scene) -> None:
    noted = []
    for _ in range(200):
        noted += [scene.now] if scene.heartbeat.worth_noting(0) else []
        scene.now += 1
    assert noted == [1000, 1060, 1120, 1180]
