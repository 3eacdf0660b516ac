"""Deselect the tests here where there is no CUDA device, instead of skipping them one by one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    mine = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]
