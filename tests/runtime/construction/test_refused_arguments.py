"""Test what ``zero.Init`` and ``GatheredParameters`` are given that they cannot use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import join, run_workers


def _refuse() -> int:
    rank = join()
    model = nn.Linear(2, 2)
    gathered: Any = zlaunch.zero.GatheredParameters
    for params in (model.named_parameters(), model.state_dict(), ["weight"], 3):
        with pytest.raises(TypeError, match="GatheredParameters: params: expected"), gathered(params):
            pass
    with gathered(model.state_dict().values()), gathered([]), gathered(torch.zeros(1)), gathered(model):
        pass
    with pytest.raises(TypeError, match="enabeld"):
        zlaunch.zero.Init(enabeld=False)
    zlaunch.zero.Init(enabled=False, zero_param_parallel_group=None, param_swapper=None)
    return rank


def test_names_in_the_place_of_parameters_and_unknown_keywords_are_refused() -> None:
    assert run_workers(_refuse, 1) == [0]
