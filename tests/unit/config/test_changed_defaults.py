"""Test which defaults are named because DeepSpeed has changed them: those in use and not in the config."""

from __future__ import annotations

from typing import Any

import pytest

from zlaunch.runtime.config import load, resolve

CLIPPING = "gradient_clipping"
OVERFLOW = "bf16.check_grad_overflow"
PINNED = "zero_optimization.offload_optimizer.pin_memory"


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({}, [CLIPPING]),
        ({CLIPPING: 1.0}, []),
        ({"bf16": {"enabled": True}}, [CLIPPING, OVERFLOW]),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, [CLIPPING]),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, [CLIPPING, PINNED]),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, [CLIPPING]),
    ],
)
def test_what_is_named(sections: dict[str, Any], named: list[str]) -> None:
    effective = resolve(load({"train_batch_size": 1, **sections}), world_size=1)
    assert [line.partition(" is not set")[0] for line in effective.changed_defaults()] == named
