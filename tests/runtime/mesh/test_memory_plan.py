"""Test that the memory plan counts what groups and packing keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import config, net
from tests.runtime.workers import run_workers
from zlaunch.runtime.memory.estimate import plan

GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _planned() -> dict[str, tuple[int, int, int]]:
    """Parameters, gradients and optimizer in bytes, by setting."""
    import zlaunch.runtime.memory.preflight as preflight

    join_nodes(2)
    found: dict[str, tuple[int, int, int]] = {}
    kept: list[Any] = []
    make = preflight.Setting

    def noted(**facts: Any) -> Any:
        kept.append(make(**facts))
        return kept[-1]

    preflight.Setting = noted  # type: ignore[misc, assignment]
    copies = {"zero_hpz_partition_size": 2}
    packed = {"zero_quantized_gradients": True}
    for name, zero in (
        ("world", {}),
        ("node", {"shard_group": "node"}),
        ("copies", copies),
        ("packed", {**copies, **packed}),
        ("errors", {**copies, **packed, "zeropp_loco_param": {}}),
    ):
        settings = config(3, 4, zero=zero)
        settings["bf16"] = {"enabled": True}
        engine, *_ = zlaunch.initialize(model=net(width=96, depth=4), config=settings)
        total = plan(kept[-1])
        found[name] = total.parameters.device, total.gradients.device, total.optimizer.device
        engine.destroy()
    found["numel"] = (sum(p.numel() for p in net(width=96, depth=4).parameters()), 0, 0)
    torch.distributed.barrier()
    return found


@pytest.mark.exhaustive
def test_what_is_kept_is_planned() -> None:
    for found in run_workers(_planned, 4, env=GLOO):
        n = found["numel"][0]
        world, node, copies = found["world"], found["node"], found["copies"]
        assert abs(node[2] - 2 * world[2]) <= 64 and copies[2] == world[2]
        assert abs(copies[0] - world[0] - 2 * n / 2) <= 64, "half of the parameters in bf16"
        assert found["packed"] == copies
        assert abs(found["errors"][1] - found["packed"][1] - 2 * (n + n / 2)) <= 64
