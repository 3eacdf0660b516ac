"""Test how long an agent takes its launcher's silence, with a clock that the test sets."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from zlaunch.node import agent as module
from zlaunch.node.agent import Uplink, take_user_input
from zlaunch.system import boot_clock
from zlaunch.system.messages import Command, Ping, Stop

HOUR_S = 3600.0


class Scene:
    """An uplink over two pipes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(boot_clock, "now_s", lambda: self.now)
        stdin, self.commands = os.pipe()
        self.events, stdout = os.pipe()
        os.set_blocking(self.events, False)
        self.uplink = Uplink(stdin, stdout)
        self.fds = [stdin, self.commands, self.events, stdout]

    def tell(self, *commands: dict[str, Any]) -> list[Command] | None:
        for command in commands:
            os.write(self.commands, json.dumps(command).encode() + b"\n")
        return self.uplink.read()

    def silence_after(self, seconds: float) -> str:
        """What is wrong with the silence after so many seconds more."""
        self.now += seconds
        return self.uplink.too_silent(20.0)

    def hang_up(self) -> None:
        os.close(self.commands)
        self.fds.remove(self.commands)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    for fd in made.fds:
        os.close(fd)


def test_commands_come_whole_and_in_order_and_a_hang_up_is_told_from_nothing(scene: Scene) -> None:
    assert scene.uplink.read() == []
    os.write(scene.commands, b'{"cmd": "ping"}\n{"cmd": "st')
    assert scene.uplink.read() == [Ping()]
    os.write(scene.commands, b'op"}\nnoise\n')
    assert scene.uplink.read() == [Stop()]
    scene.hang_up()
    assert scene.uplink.read() is None


def test_before_the_plan_the_launcher_says_how_long_it_may_take(scene: Scene) -> None:
    assert scene.silence_after(module._IDLE_S) == ""
    assert scene.silence_after(0.1) == "no plan has come"
    scene.tell({"cmd": "hello", "idle_s": 900})
    assert scene.silence_after(900.0) == "" and scene.silence_after(0.1) == "no plan has come"
    scene.tell({"cmd": "ping"})
    assert scene.silence_after(900.0) == "", "a command without a number leaves the last one"
    scene.uplink.await_plan()
    assert scene.silence_after(900.0) == "", "after an attempt the time counts anew"


def test_with_a_plan_the_launcher_must_extend_the_lease(scene: Scene) -> None:
    assert scene.uplink.take_plan(60.0, 1060.0)
    assert scene.silence_after(39.0) == "", "the grace period of 20 s lies within the lease"
    scene.tell({"cmd": "ping", "lease": 1070.0})
    assert scene.silence_after(10.9) == ""
    assert scene.uplink.read() == [], "a look that finds nothing extends nothing"
    assert "the launcher has not been heard for 11 s" in scene.silence_after(0.2)
    assert not scene.uplink.lease_is_over()
    scene.now += 19.5
    assert scene.uplink.lease_is_over()


def test_commands_without_a_lease_extend_none(scene: Scene) -> None:
    """Whatever the network has delayed or sent once more."""
    scene.uplink.take_plan(60.0, 1060.0)
    for _ in range(6):
        scene.now += 9.0
        scene.tell({"cmd": "ping", "lease": 1060.0}, {"cmd": "signal", "signum": 0}, {"cmd": "ping"})
    assert scene.uplink.too_silent(20.0)


def test_a_plan_that_has_been_on_its_way_too_long_is_not_begun(scene: Scene) -> None:
    scene.now += 100.0
    assert not scene.uplink.take_plan(60.0, 1090.0)
    assert scene.uplink.take_plan(60.0, 1130.0)
    assert scene.uplink.take_plan(60.0, None), "a launcher that knows no beat of it has just sent it"


def test_a_launcher_on_this_machine_may_be_silent_for_ever(scene: Scene) -> None:
    assert scene.uplink.take_plan(0.0, None)
    assert scene.silence_after(1000 * HOUR_S) == "" and not scene.uplink.lease_is_over()
    assert scene.uplink.next_s(3.0, 1.0) == 1.0


def test_a_launcher_that_is_stopped_grants_a_day_until_it_continues(scene: Scene) -> None:
    scene.uplink.take_plan(60.0, 1060.0)
    scene.tell({"cmd": "ping", "lease": 1060.0}, {"cmd": "pause", "lease": 1000.0 + 24 * HOUR_S})
    assert scene.silence_after(23 * HOUR_S) == ""
    scene.tell({"cmd": "ping", "lease": scene.now + 60.0})
    assert scene.silence_after(39.0) == "" and scene.silence_after(2.0)


def test_the_agent_wakes_for_the_lease(scene: Scene) -> None:
    scene.uplink.take_plan(3.0, None)
    assert scene.uplink.next_s(20.0, 9.0) == pytest.approx(2.0), "a third of it is left for the grace period"
    scene.now += 2.5
    assert scene.uplink.next_s(20.0, 9.0) == pytest.approx(0.2), "SIGKILL comes a little before the end"


@pytest.fixture
def full(scene: Scene) -> Scene:
    """A scene with more output than its pipe takes."""
    scene.uplink.outbox.put_output(0, "stdout", b"x" * (1 << 20))
    assert scene.uplink.outbox.pending
    return scene


def waits(scene: Scene, monkeypatch: pytest.MonkeyPatch, *rounds: Any) -> list[float]:
    """Hand the rest over; each wait calls one function and then takes as long as was asked for, unless the
    function gives seconds. Returns how long each wait was to take at most.
    """
    todo, asked = iter(rounds), list[float]()
    real = select.select

    def wait(readers: Any, writers: Any, others: Any, seconds: float) -> Any:
        asked.append(seconds)
        takes = next(todo, lambda: None)()
        scene.now += seconds if takes is None else takes
        return real(readers, writers, others, 0)

    monkeypatch.setattr(select, "select", wait)
    scene.uplink.hand_over()
    return asked


def drain(scene: Scene) -> float:
    """Take what the pipe holds, after 10 seconds."""
    os.read(scene.events, 1 << 20)
    return 10.0


def test_the_rest_of_the_output_goes_out_while_some_of_it_is_taken(
    full: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.uplink.heartbeat_s = 60.0
    asked = waits(full, monkeypatch, *[lambda: drain(full)] * 32)
    assert full.uplink.outbox.pending == 0 and set(asked) == {60.0}


def test_the_rest_is_given_up_after_a_heartbeat_in_which_nothing_was_taken(
    full: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.uplink.heartbeat_s = 60.0
    assert waits(full, monkeypatch) == [60.0] and full.uplink.outbox.pending


def test_a_launcher_that_is_heard_is_waited_for(full: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    full.uplink.heartbeat_s = 60.0

    def ping() -> float:
        os.write(full.commands, b'{"cmd": "ping"}\n')
        return 50.0

    assert waits(full, monkeypatch, ping, ping) == [60.0] * 3


def test_a_launcher_that_has_hung_up_is_waited_for_a_moment(
    full: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up() -> float:
        full.hang_up()
        return 1.0

    full.uplink.heartbeat_s = 0.0
    asked = waits(full, monkeypatch, hang_up)
    assert asked == [module._HALTED_S, module._GOODBYE_S - 1.0]


def test_a_paused_launcher_gets_the_rest_within_a_day(full: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    full.uplink.take_plan(60.0, None)
    full.tell({"cmd": "pause", "lease": full.now + 24 * HOUR_S})
    assert waits(full, monkeypatch) == [pytest.approx(24 * HOUR_S, abs=1.0)]


def test_the_users_input_is_taken_once_and_not_inherited(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = scene.uplink.stdin
    os.set_inheritable(fd, True)
    monkeypatch.setenv("ZLAUNCH_STDIN_FD", str(fd))
    assert take_user_input() == fd and not os.get_inheritable(fd)
    assert take_user_input() is None
