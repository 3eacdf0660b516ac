"""Test how long an agent takes its launcher's silence, with a clock that the test sets."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from zlaunch.node import uplink as module
from zlaunch.node.uplink import Uplink, take_user_input

HOUR_S = 3600.0


class Scene:
    """An uplink over two pipes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        stdin, self.commands = os.pipe()
        self.events, stdout = os.pipe()
        os.set_blocking(self.events, False)
        self.uplink = Uplink(stdin, stdout)
        self.fds = [stdin, self.commands, self.events, stdout]

    def tell(self, *commands: dict[str, Any]) -> list[dict[str, Any]] | None:
        for command in commands:
            os.write(self.commands, json.dumps(command).encode() + b"\n")
        return self.uplink.read()

    def silence_after(self, seconds: float) -> str:
        """What is wrong with the silence after so many seconds more."""
        self.now += seconds
        return self.uplink.too_silent()

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
    assert scene.uplink.read() == [{"cmd": "ping"}]
    os.write(scene.commands, b'op"}\nnoise\n')
    assert scene.uplink.read() == [{"cmd": "stop"}]
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


def test_with_a_plan_the_launcher_must_be_heard_within_a_heartbeat(scene: Scene) -> None:
    scene.uplink.heartbeat_s = 60.0
    assert scene.silence_after(60.0) == ""
    scene.tell({"cmd": "ping"})
    assert scene.silence_after(60.0) == ""
    assert scene.uplink.read() == [], "a look that finds nothing is no sign of life"
    assert scene.silence_after(0.1) == "the launcher has been silent for 60 s"


def test_half_a_command_is_a_sign_of_life(scene: Scene) -> None:
    scene.uplink.heartbeat_s = 60.0
    scene.now += 50.0
    os.write(scene.commands, b'{"cmd": ')
    scene.uplink.read()
    assert scene.silence_after(60.0) == ""
    os.write(scene.commands, b'"pause"}\n')
    scene.uplink.read()
    os.write(scene.commands, b'{"cmd": ')
    scene.uplink.read()
    assert scene.silence_after(61.0) == "the launcher has been silent for 60 s", "the pause is over"


def test_a_launcher_on_this_machine_may_be_silent_for_ever(scene: Scene) -> None:
    scene.uplink.heartbeat_s = 0.0
    assert scene.silence_after(1000 * HOUR_S) == ""


def test_a_paused_launcher_may_be_silent_for_a_day_and_until_it_is_heard(scene: Scene) -> None:
    scene.uplink.heartbeat_s = 60.0
    scene.tell({"cmd": "ping"}, {"cmd": "pause"})
    assert scene.silence_after(24 * HOUR_S) == ""
    assert scene.silence_after(1.0) == "the launcher has been stopped for 24 hours"
    scene.tell({"cmd": "ping"})
    assert scene.silence_after(61.0) == "the launcher has been silent for 60 s"


def test_a_pause_that_something_follows_is_over(scene: Scene) -> None:
    scene.uplink.heartbeat_s = 60.0
    scene.tell({"cmd": "pause"}, {"cmd": "ping"})
    assert scene.silence_after(61.0) == "the launcher has been silent for 60 s"


@pytest.fixture
def full(scene: Scene) -> Scene:
    """A scene with more output than its pipe takes."""
    scene.uplink.outbox.put({"type": "output", "text": "x" * (1 << 20)})
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
    assert asked == [module._PAUSE_S, module._GOODBYE_S - 1.0]


def test_a_paused_launcher_gets_the_rest_within_a_day(full: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    full.uplink.heartbeat_s = 60.0
    full.tell({"cmd": "pause"})
    assert waits(full, monkeypatch) == [module._PAUSE_S]


def test_the_users_input_is_taken_once_and_not_inherited(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = scene.uplink.stdin
    os.set_inheritable(fd, True)
    monkeypatch.setenv("ZLAUNCH_STDIN_FD", str(fd))
    assert take_user_input() == fd and not os.get_inheritable(fd)
    assert take_user_input() is None
