"""Test that ranks which share layers are told when one of them makes a call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import join, run_workers

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "tensor_parallel": {"autotp_size": 2, "plan": {"0": "colwise", "1": "rowwise"}},
}


def _alone() -> str:
    rank = join()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = zlaunch.initialize(model=model, config=CONFIG)
    try:
        if rank == 0:
            engine.module.state_dict()
        engine(torch.ones(2, 4))
    except RuntimeError as error:  # the other rank may have ended by then
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_a_state_dict_of_one_rank_ends_with_a_message() -> None:
    found = run_workers(_alone, 2)
    assert all(found)
    assert any("all-gathers a parameter" in said and "is deadlocked" in said for said in found), found
