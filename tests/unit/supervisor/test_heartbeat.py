"""Test when a node counts as silent, with a clock that the test moves."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.supervisor.clock_bound import ClockBound
from zlaunch.supervisor.nodes import _PAUSE_S, Heartbeat
from zlaunch.system import boot_clock
from zlaunch.system.messages import Pause, Ping, Pong


class Scene:
    """A heartbeat of one node, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(boot_clock, "now_s", lambda: self.now)
        self.sent: list[Any] = []
        self.link: Any
        self.link = SimpleNamespace(clock=ClockBound(), send=self.sent.append)
        self.heartbeat = Heartbeat([self.link], 60.0, queue.SimpleQueue())

    def hear_beat(self, delay_s: float = 0.0) -> None:
        """Hear a beat of an agent whose clock is 1000 s behind."""
        self.link.clock.hear(self.now - delay_s - 1000.0, self.now)
        self.heartbeat.heard(0)

    def granted_s(self) -> float:
        """The end of the lease of the newest ping, on the launcher's clock."""
        end: float = self.sent[-1].lease
        return end + 1000.0


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_was_heard_ends_the_silence(scene: Scene) -> None:
    scene.now += 50
    assert scene.heartbeat.silence_s(0) == 50
    scene.heartbeat.heard(0)
    assert scene.heartbeat.silence_s(0) == 0


def test_a_node_that_is_silent_is_granted_nothing_more(scene: Scene) -> None:
    scene.hear_beat()
    scene.heartbeat._ping(0)
    ends = scene.granted_s()
    scene.now += 20
    scene.heartbeat._ping(0)
    assert scene.granted_s() == ends
    scene.hear_beat()
    scene.heartbeat._ping(0)
    assert scene.granted_s() == ends + 20


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


# -- leases: what is granted never lasts longer than what is waited for


def test_a_plan_s_lease_ends_a_period_after_the_plan_on_the_agent_s_clock(scene: Scene) -> None:
    scene.hear_beat()
    scene.now += 25
    assert scene.heartbeat.first_grant(0) == scene.now + 60.0 - 1000.0
    assert scene.heartbeat.lease_ends(0) == pytest.approx(scene.now + 60.0, abs=1.0)


def test_a_node_that_is_silent_gets_no_longer_lease(scene: Scene) -> None:
    scene.hear_beat()
    until, ends = scene.now + 60.0, scene.heartbeat.lease_ends(0)
    for _ in range(5):
        scene.now += 15
        scene.heartbeat._ping(0)
        assert isinstance(scene.sent[-1], Ping) and scene.granted_s() == until
    assert scene.heartbeat.lease_ends(0) == ends


def test_output_that_is_heard_makes_a_lease_longer_while_answers_wait_behind_it(scene: Scene) -> None:
    scene.hear_beat()
    scene.now += 40
    scene.heartbeat.heard(0)
    scene.now += 15
    scene.heartbeat._ping(0)
    assert scene.granted_s() == scene.now - 15 + 60.0
    assert scene.heartbeat.lease_ends(0) == pytest.approx(scene.now - 15 + 60.0, abs=1.0)
    with scene.heartbeat.excused(0):
        scene.now += 500
        scene.heartbeat._ping(0)
        assert scene.granted_s() == scene.now + 60.0
        assert scene.heartbeat.lease_ends(0) == pytest.approx(scene.now + 60.0, abs=1.0)


def test_answers_that_are_read_late_make_no_lease_shorter(scene: Scene) -> None:
    """They have waited in the pipes while the terminal stood still, or between two attempts."""
    scene.hear_beat()
    scene.now += 500
    scene.hear_beat(delay_s=400.0)
    scene.heartbeat._ping(0)
    assert scene.granted_s() == scene.now + 60.0


def test_a_clock_that_runs_otherwise_spoils_no_bound_for_long(scene: Scene) -> None:
    scene.hear_beat()
    for _ in range(25):
        scene.now += 60
        scene.hear_beat(delay_s=0.25)
    scene.heartbeat._ping(0)
    assert scene.granted_s() == scene.now + 60.0 - 0.25, "the oldest beat is forgotten"


def test_a_long_lease_for_a_launcher_that_is_stopped_ends_once_the_node_knows_that_it_continues(
    scene: Scene,
) -> None:
    scene.hear_beat()
    scene.heartbeat.pause()
    until = scene.now + _PAUSE_S
    assert scene.sent == [Pause(until - 1000.0)]
    scene.now += 500
    scene.heartbeat.resume()
    assert scene.sent[-1].pauses == 1 and scene.granted_s() == scene.now + 60.0
    scene.heartbeat.heard(0, Pong("n", 0.0, 0, 0.0))  # of a ping from before the pause
    assert scene.heartbeat.lease_ends(0) >= until, "it may not have heard that the pause is over"
    scene.heartbeat.heard(0, Pong("n", 0.0, 1, 0.0))
    assert scene.heartbeat.lease_ends(0) < scene.now + 61


def test_no_lease_on_this_machine(scene: Scene) -> None:
    alone = Heartbeat([scene.link], 0.0, queue.SimpleQueue())
    scene.hear_beat()
    assert alone.first_grant(0) is None and alone.lease_ends(0) == 0.0


def test_a_node_that_is_given_up_gets_no_lease_that_outlasts_what_is_waited_for(scene: Scene) -> None:
    """Its network may heal at that very moment."""
    scene.hear_beat()
    ends = scene.heartbeat.give_up(0)
    scene.now += 30
    scene.hear_beat()
    scene.heartbeat._ping(0)
    scene.heartbeat.pause()
    scene.heartbeat.resume()
    assert scene.sent == [] and ends < scene.now + 31
