"""Test that a lease never outlasts what the launcher waits for, whatever clocks and networks do."""

from __future__ import annotations

import queue
import random
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.node.lease import Lease
from zlaunch.supervisor.clock_bound import ClockBound
from zlaunch.supervisor.nodes import _LATE_S, Heartbeat
from zlaunch.system import boot_clock
from zlaunch.system.messages import Start

HEARTBEAT_S, GRACE_S = 15.0, 20.0


class Scene:
    """An agent and a launcher whose clocks differ, and a network that takes any time until it is cut.

    `now` is the true time; nobody knows it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> None:
        self.now, self.dice, self.ahead = 0.0, dice, dice.uniform(-1e6, 1e6)
        monkeypatch.setattr(boot_clock, "now_s", lambda: self.now)
        self.lease = Lease()
        self.down: list[tuple[float, Any]] = []
        self.up: list[tuple[float, Any]] = []
        self.link: Any
        self.link = SimpleNamespace(clock=ClockBound(), send=self.send)
        self.heartbeat = Heartbeat([self.link], HEARTBEAT_S, queue.SimpleQueue())
        self.has_plan = False

    def agent_s(self) -> float:
        return self.now + self.ahead

    def on_its_way(self, wire: list[tuple[float, Any]]) -> float:
        """Return when something that is sent now arrives: nothing overtakes on one connection."""
        delay = self.dice.choice((0.001, 0.1, 1.0, 7.0, 40.0)) * self.dice.random()
        return max(self.now + delay, wire[-1][0] if wire else 0.0)

    def send(self, message: Any) -> None:
        self.down.append((self.on_its_way(self.down), message))

    def answer(self) -> None:
        self.up.append((self.on_its_way(self.up), self.agent_s()))

    def deliver(self) -> None:
        while self.down and self.down[0][0] <= self.now:
            message = self.down.pop(0)[1]
            if isinstance(message, Start):
                assert message.lease is not None
                self.lease.begin(HEARTBEAT_S, message.lease)
                self.has_plan = True
            else:
                self.lease.extend(message.lease)
                self.answer()
        while self.up and self.up[0][0] <= self.now:
            self.link.clock.hear(self.up.pop(0)[1], self.now)
            self.heartbeat.heard(0)


@pytest.mark.parametrize("seed", range(40))
def test_all_are_dead_when_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    scene = Scene(monkeypatch, random.Random(seed))
    scene.answer()  # to hello
    while scene.link.clock.ahead_s is None:
        scene.now += 0.5
        scene.deliver()
    scene.now += scene.dice.uniform(0.0, 600.0)  # other nodes are waited for
    scene.send(Start({}, scene.heartbeat.first_grant(0)))
    cut_s = scene.now + scene.dice.uniform(0.0, 100.0)
    while scene.now < cut_s:
        scene.now += HEARTBEAT_S / 4
        scene.heartbeat._ping(0)
        scene.deliver()
    scene.up.clear()  # nothing is heard any more; what is on its way to the node still arrives
    dead_s = scene.heartbeat.lease_ends(0)
    while scene.down:
        scene.now = max(scene.now, scene.down[0][0])
        scene.deliver()
        scene.up.clear()
        kill_at = scene.lease.kill_at()
        assert kill_at is None or kill_at - scene.ahead <= dead_s - _LATE_S, "a lease is longer"
    assert scene.has_plan


def test_the_grace_period_lies_within_the_lease() -> None:
    lease = Lease()
    assert lease.stop_at(GRACE_S) is None and lease.kill_at() is None
    lease.extend(1000.0)
    assert lease.kill_at() is None, "there is no plan"
    lease.begin(30.0, 130.0)
    assert (lease.stop_at(GRACE_S), lease.kill_at()) == (120.0, 129.5), "a third of the heartbeat at most"
    assert (lease.stop_at(3.0), lease.stop_at(0.0)) == (127.0, 129.5)
    lease.close()
    assert lease.kill_at() is None
