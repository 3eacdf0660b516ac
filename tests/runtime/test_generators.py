"""Test that the engine leaves the script's generators of random numbers alone."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import pytest
import torch

import zlaunch
from tests.runtime.models import Net, batches, config, train_engine
from tests.runtime.workers import join, run_workers

pytestmark = pytest.mark.multi_gpu


def _states() -> list[Any]:
    numpys: Any = numpy.random.get_state()
    found = [torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist()]
    if torch.cuda.is_available():
        found.append(torch.cuda.get_rng_state().tolist())
    return found


def _drawn() -> list[str]:
    """Return the settings with which the engine has drawn, when it was built or in two steps."""
    join()
    # as of a launched run, for which the ranks measure what they can reach
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(os.devnull, os.O_WRONLY))
    sections: dict[str, dict[str, Any]] = {
        "stage 0": config(0, 4),
        "stage 3, bf16": config(3, 4, bf16={"enabled": True}),
        "stage 2, fp16, offload": config(
            2, 4, fp16={"enabled": True}, zero={"offload_optimizer": {"device": "cpu"}}
        ),
        "autocast": config(1, 4, torch_autocast={"enabled": True}),
    }
    found = []
    for name, section in sections.items():
        model = Net()
        before = _states()
        engine, *_ = zlaunch.initialize(model=model, config=section)
        built = _states()
        train_engine(engine, batches(2, 4 * engine.world_size))
        if before != built or built != _states():
            found.append(name)
        engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_drawn(world_size: int) -> None:
    """Dropout and data of the script would be others than without the engine."""
    assert run_workers(_drawn, world_size) == [[]] * world_size
