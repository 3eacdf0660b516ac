"""Test when accelerate's first state is told of the other workers, with a package in accelerate's place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zlaunch.node import accelerate_state

STATE = """
from types import SimpleNamespace

class PartialState:
    _shared_state = {}
    kind, processes = "cpu", 2

    def __init__(self, cpu=False, **options):
        self.__dict__ = self._shared_state
        if not self._shared_state:
            self.cpu, self.options, self.num_processes = cpu, options, self.processes

    @property
    def default_device(self):
        return SimpleNamespace(type=self.kind)

    @staticmethod
    def _reset_state():
        PartialState._shared_state.clear()
"""


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports the package in a worker, and watches before or, with ``late``, after."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(STATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)

    def make(world: int = 2, *, late: bool = False) -> Any:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        if late:
            importlib.import_module("accelerate.state")
        before = len(sys.meta_path)
        accelerate_state.watch()
        module = importlib.import_module("accelerate.state")
        assert len(sys.meta_path) == before
        return module.PartialState

    yield make
    for name in ("accelerate.state", "accelerate"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("late", [True, False])
def test_cpu_workers_are_told(kind: Any, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kind(late=late)
    state = made(timeout=3)
    assert state.cpu is True and state.options == {"timeout": 3}
    assert made().cpu is True, "a later one is the same state"
    made._reset_state()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    state = made()
    assert state.cpu is False and state.options == {"backend": "gloo"}


def test_others_are_left_alone(kind: Any) -> None:
    made = kind()
    made.kind = "cuda"
    state = made(backend="nccl")
    assert state.cpu is False and state.options == {"backend": "nccl"}


def test_a_lone_worker_is_left_alone(kind: Any) -> None:
    made = kind(world=1)
    made.processes = 1
    assert made().cpu is False


def test_a_worker_that_still_is_a_run_of_its_own_ends_with_the_reason(kind: Any) -> None:
    made = kind()
    made.processes = 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as a separate run, but it is one of 2"):
            made()
