"""Lightning's teardown over an optimizer whose state is lost.

Lightning itself runs in ``tests.compat.projects``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import Net, batches, config, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.compat import deepspeed as compat

TEARDOWN = """
def _optimizer_to_device(optimizer, device):
    for parameter, state in optimizer.state.items():
        moved.append(parameter)
moved = []
"""


def _tear_down(folder: str) -> int:
    join()
    compat.install()
    deepspeed: Any = importlib.import_module("deepspeed")
    sys.path.insert(0, folder)
    teardown: Any = importlib.import_module("lightning.fabric.utilities.optimizer")
    model = Net()
    mine = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=mine, config=config(1, 4))
    train_engine(engine, batches(1, 8))
    deepspeed.initialize(model=model, config=config(1, 4))  # as Lightning's test does after its fit
    teardown._optimizer_to_device(mine, torch.device("cpu"))
    with pytest.raises(zlaunch.OptimizerError, match="lost since"):
        mine.state_dict()
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), momentum=0.9)
    plain.param_groups[0]["params"][0].grad = torch.ones(1, 1)
    plain.step()
    teardown._optimizer_to_device(plain, torch.device("cpu"))
    return len(teardown.moved)


def test_a_run_ends_over_an_optimizer_without_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "lightning/fabric/utilities"
    folder.mkdir(parents=True)
    (folder / "optimizer.py").write_text(TEARDOWN)
    assert run_workers(_tear_down, 2, str(tmp_path)) == [1, 1]
