"""Test what a step's clock adds up, with a time that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zlaunch.runtime.observe import clock as module
from zlaunch.runtime.observe.clock import DISK, StepClock, TimedStep


class Scene:
    """A clock on the CPU, the time, what was waited, and the steps that it has told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited, self.steps = 100.0, 7.0, 0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.clock = StepClock(
            torch.device("cpu"), lambda: (self.steps, 4 * self.steps), {DISK: lambda: self.waited}
        )
        self.told: list[TimedStep] = []
        self.jumps = 0
        self.clock.listeners.append(self.told.append)
        self.clock.on_jump = self.jump

    def jump(self) -> None:
        self.jumps += 1

    def part(self, name: str, took_s: float, waited_s: float = 0.0, *, steps: int = 0) -> None:
        with self.clock.part(name):
            self.now += took_s
            self.waited += waited_s
            self.steps += steps

    def step(self) -> dict[str, Any]:
        """Return a step's times: 2 s forward, of which it waits 0.5 s, 3 s backward, 1 s for its step."""
        self.part("forward", 2, 0.5)
        self.now += 1  # of the script
        self.part("backward", 3)
        self.part("step", 1, 0.25, steps=1)
        return self.told[-1].milliseconds()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_every_step_has_its_own_times(scene: Scene) -> None:
    wanted = {
        **{"forward": 2000.0, "backward": 3000.0, "step": 1000.0, "all": 7000.0},
        **{"disk": 750.0, "disk in forward": 500.0, "disk in step": 250.0},
    }
    for number in (1, 2, 3):
        assert scene.step() == pytest.approx(wanted)
        assert (scene.told[-1].number, scene.told[-1].samples) == (number, 4 * number)


def test_what_is_waited_between_the_calls_is_the_scripts(scene: Scene) -> None:
    scene.waited += 2
    assert scene.step()["disk in rest"] == pytest.approx(2000.0)


def test_an_accumulated_step_ends_with_the_last_micro_batch(scene: Scene) -> None:
    scene.part("forward", 1)
    scene.part("step", 1)
    assert scene.told == []
    assert scene.step()["forward"] == pytest.approx(3000.0)


def test_a_forward_pass_without_gradients_is_no_part(scene: Scene) -> None:
    with torch.no_grad():
        scene.part("forward", 5)
    times = scene.step()
    assert times["forward"] == pytest.approx(2000.0) and times["all"] == pytest.approx(12000.0)


def test_a_part_inside_of_one_of_its_name_counts_once(scene: Scene) -> None:
    with scene.clock.part("forward"):
        scene.part("forward", 1)
        scene.now += 1
    assert scene.step()["forward"] == pytest.approx(4000.0)


def test_a_jump_is_no_step(scene: Scene) -> None:
    scene.steps = 40  # a checkpoint was loaded
    scene.part("step", 1, steps=1)
    assert (scene.told, scene.jumps) == ([], 1)
    assert scene.step()["all"] == pytest.approx(7000.0) and scene.told[-1].number == 42


def test_what_failed_is_no_time(scene: Scene) -> None:
    with pytest.raises(ValueError), scene.clock.part("forward"):
        scene.now += 1
        raise ValueError
    assert scene.step()["forward"] == pytest.approx(2000.0)
