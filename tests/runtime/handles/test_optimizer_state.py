"""Test what libraries and scripts do with ``optimizer.state`` while an engine has the optimizer."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.handles.test_optimizer import options
from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.zero import placeholder


def _to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state, as ``_optimizer_to_device`` of Lightning 2.6 does."""
    for p, v in optimizer.state.items():
        if not isinstance(v, MutableMapping):
            optimizer.state[p] = v.to(device)
            continue
        for key, value in v.items():
            if key != "step":
                v[key] = value.to(device)


def _teardown(stage: int) -> str:
    """Do what Lightning's DeepSpeedStrategy does at the end of ``fit``; return what was printed."""
    rank = join()
    model = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=options(stage))[0]
    engine.backward(loss_of(engine, batches(1, 4)[0].chunk(2)[rank]))
    engine.step()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(2):
            _to_device(optimizer, torch.device("cpu"))
            model.cpu()
            assert not optimizer.state and model.head.weight not in optimizer.state
            assert list(optimizer.state.values()) == []
    weight = model.head.weight

    def assign() -> None:
        optimizer.state = defaultdict(dict)

    for use in (
        lambda: optimizer.state[weight],
        lambda: optimizer.state.get(weight),
        lambda: optimizer.state.setdefault(weight, {}),
        lambda: optimizer.state.pop(weight, None),
        lambda: optimizer.state.update({weight: {}}),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.__setitem__(weight, {}),
        lambda: optimizer.state.__delitem__(weight),
        assign,
    ):
        with pytest.raises(zlaunch.OptimizerError, match="safe_get_full_optimizer_state"):
            use()
    engine.backward(loss_of(engine, batches(1, 4)[0].chunk(2)[rank]))
    engine.step()
    return said.getvalue()


def test_the_state_reads_as_empty_once_warned_and_refuses_entries() -> None:
    for stage in (0, 3):
        for said in run_workers(_teardown, 2, stage):
            assert said.count("reads as empty") == 1 == said.count("\n")
            assert "zlaunch.safe_get_full_optimizer_state" in said


def _moved(lenient: bool) -> tuple[list[str], bool]:
    """Move a model that an engine has to another device, as Lightning's teardown does on a GPU."""
    join()
    model = net()
    engine: Any = zlaunch.initialize(model=model, config=options(3))[0]
    placeholder.settings.lenient = lenient  # as under the deepspeed alias
    said = []
    for change in (lambda: model.to("meta"), lambda: model.head.to("meta"), model.half, model.cpu):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                change()
            except RuntimeError as error:
                said.append(f"error: {error}")
            said += [f"warning: {warning.message}" for warning in caught]
    stays = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    engine.destroy()
    return [text[:62] for text in said], stays


def test_a_move_to_another_device_is_refused_or_warned_of_under_the_alias() -> None:
    moved = "this model belongs to a zlaunch engine and stays on cpu"
    half = "error: this model belongs to a zlaunch engine and stays torch."
    for lenient, kind in ((False, "error"), (True, "warning")):
        assert run_workers(_moved, 1, lenient) == [([f"{kind}: {moved}"[:62]] * 2 + [half], True)]
