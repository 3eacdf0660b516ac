"""Test which nodes the heartbeat's thread reports: its rounds run in the test, with a clock that is set."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import FOR_EVER_S
from zlaunch.supervisor.clock_bound import ClockBound
from zlaunch.supervisor.nodes import Heartbeat, HeartbeatTimeout
from zlaunch.system import boot_clock
from zlaunch.system.messages import Command, Pause, Ping

PERIOD_S = 40.0
PAUSE_S = PERIOD_S / 4
PING = Ping(lease=None, pauses=0)
"""A ping to a node that has not been heard of before the run: without a lease."""


class Scene:
    """The heartbeat of two nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(boot_clock, "now_s", lambda: self.now)
        self.events: queue.SimpleQueue[tuple[int, HeartbeatTimeout]] = queue.SimpleQueue()
        self.sent: list[list[Command]] = [[], []]
        links: Any = [SimpleNamespace(clock=ClockBound(), send=sent.append) for sent in self.sent]
        self.heart = Heartbeat(links, PERIOD_S, self.events)

    def rounds(self, *seconds: float, first: Callable[[], object] = lambda: None) -> None:
        """Run one round after each of these numbers of seconds; call ``first`` before each."""
        todo = iter(seconds)

        def wait(pause_s: float) -> bool:
            assert pause_s == PAUSE_S
            step = next(todo, None)
            if step is None:
                return True
            self.now += step
            first()
            return False

        end: Any = SimpleNamespace(wait=wait)
        self.heart._end = end
        self.heart._run()

    def hears_one(self) -> None:
        self.heart.heard(1)

    def silent(self) -> list[int]:
        """The nodes that were reported since the last call."""
        found = []
        while not self.events.empty():
            index, event = self.events.get()
            assert event.silence_s > PERIOD_S
            found.append(index)
        return found


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_node_is_silent_after_a_period_and_reported_once(scene: Scene) -> None:
    scene.rounds(*[PAUSE_S] * 4, first=scene.hears_one)
    assert scene.silent() == [], "a whole period may pass"
    scene.rounds(*[PAUSE_S] * 4, first=scene.hears_one)
    assert scene.silent() == [0]
    assert scene.sent == [[PING] * 8] * 2


def test_a_launcher_that_stood_still_has_heard_nobody_and_blames_nobody(scene: Scene) -> None:
    """A suspended laptop, or a login node under load: answers are in the pipes, and not read yet."""
    scene.rounds(PAUSE_S, 100 * PERIOD_S)
    assert scene.silent() == [] and scene.heart.silence_s(0) == 0.0
    scene.rounds(*[PAUSE_S] * 5)
    assert scene.silent() == [0, 1], "it counts from then on"


def test_a_round_that_is_a_little_late_forgives_nothing(scene: Scene) -> None:
    scene.rounds(*[1.5 * PAUSE_S] * 3)
    assert scene.silent() == [0, 1]


def test_a_paused_launcher_sends_no_pings_until_it_goes_on(scene: Scene) -> None:
    scene.heart.pause()
    scene.rounds(PAUSE_S)
    assert scene.sent == [[Pause(None)]] * 2
    scene.now += 2 * PERIOD_S
    scene.heart.forgive()
    scene.rounds(PAUSE_S)
    assert [sent[1:] for sent in scene.sent] == [[PING._replace(pauses=1)]] * 2 and scene.silent() == []


def test_a_node_that_nobody_listens_to_is_excused_and_its_time_counts_from_then(scene: Scene) -> None:
    with scene.heart.excused(0):
        scene.rounds(*[PAUSE_S] * 6, first=scene.hears_one)
        assert scene.silent() == []
    scene.rounds(*[PAUSE_S] * 4, first=scene.hears_one)
    assert scene.silent() == []
    scene.rounds(PAUSE_S, first=scene.hears_one)
    assert scene.silent() == [0]


def test_each_node_is_noted_for_itself(scene: Scene) -> None:
    assert scene.heart.worth_noting(0) and scene.heart.worth_noting(1)
    assert not scene.heart.worth_noting(0)


def test_a_period_of_0_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Any] = []
    monkeypatch.setattr("threading.Thread.start", lambda thread: threads.append(thread))
    heart = Heartbeat([], 0.0, queue.SimpleQueue())
    heart.start()
    assert not heart.watches and not threads


def test_silence_counts_from_the_start_and_an_end_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are connected to long before."""
    threads: list[Any] = []
    monkeypatch.setattr("threading.Thread.start", lambda thread: threads.append(thread))
    link: Any = None
    heart = Heartbeat([link], FOR_EVER_S, queue.SimpleQueue())
    heart._heard = [boot_clock.now_s() - 2 * FOR_EVER_S]
    heart.start()
    assert heart.watches and heart.silence_s(0) < 2 * FOR_EVER_S
    heart.stop()
    [thread] = threads
    thread.run()  # returns at once
