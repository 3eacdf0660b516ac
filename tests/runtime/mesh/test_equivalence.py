"""Test that units which are sharded over a part of the ranks train as plain torch does, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import batches, config, net, relative_error, train_engine, train_plain
from tests.runtime.workers import run_workers

pytestmark = pytest.mark.multi_gpu
STEPS, TOLERANCE, CLIP = 4, 1e-9, 0.05
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}
NODE, COPY = {"shard_group": "node"}, {"zero_hpz_partition_size": 2}


def settings(stage: int, samples: int, accumulation: int, zero: dict[str, Any]) -> dict[str, Any]:
    found = config(stage, samples, accumulation, CLIP)
    found["zero_optimization"] |= zero
    return found


def _errors(per_node: int, meshes: list[dict[str, Any]]) -> dict[str, float]:
    join_nodes(per_node)
    world = torch.distributed.get_world_size()
    worst = {}
    for accumulation in (1, 2):
        data = batches(STEPS, 12 * accumulation)
        plain = net().double()
        train_plain(plain, data, CLIP)
        wanted = plain.state_dict()
        for mesh in meshes:
            for stage in range(4):
                engine, *_ = zlaunch.initialize(
                    model=net().double(), config=settings(stage, 12 // world, accumulation, mesh)
                )
                train_engine(engine, data)
                state = engine.module.state_dict()
                worst[f"{mesh} stage {stage} accumulation {accumulation}"] = max(
                    relative_error(state[name], wanted[name]) for name in wanted
                )
                engine.destroy()
    return worst


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("world", "per_node", "meshes", "env"),
    [
        (4, 2, [NODE, COPY], {}),
        pytest.param(4, 2, [NODE, COPY, {"mics_shard_size": 1}], GLOO, marks=pytest.mark.exhaustive),
        pytest.param(6, 2, [NODE, COPY], {}, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, [NODE], {}, marks=pytest.mark.exhaustive),
        pytest.param(
            4, 4, [NODE, COPY, {"shard_group": 2}, {"shard_group": 1}], {}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["2x2", "2x2 over gloo", "3x2", "2x1", "1x4"],
)
def test_training_equals_plain_torch(
    world: int, per_node: int, meshes: list[dict[str, Any]], env: dict[str, str]
) -> None:
    for worst in run_workers(_errors, world, per_node, meshes, env=env):
        assert len(worst) == 8 * len(meshes)
        assert not {name: error for name, error in worst.items() if not error <= TOLERANCE}
