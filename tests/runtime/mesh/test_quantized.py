"""Test what is packed, how much travels then, and how well models train on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import batches, config, loss_of, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.config import ConfigError

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FROZEN = {"zero_quantized_nontrainable_weights": True}
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "world": (4, {}),
    "node": (2, {"shard_group": "node"}),
    "copies": (2, {"zero_hpz_partition_size": 2}),
}


def _bytes(mesh: str, zero: dict[str, Any]) -> dict[str, float]:
    """Bytes of the third step for each parameter (with padding), in each class of links."""
    per_node, group = MESHES[mesh]
    join_nodes(per_node)
    engine, *_ = zlaunch.initialize(
        model=net(width=96, depth=8), config=config(3, 4, zero={**group, **zero}, **BF16)
    )
    data = batches(3, 16)
    train_engine(engine, data[:2])
    link: Any = engine._sharded.comm.link
    before = link.moved
    train_engine(engine, data[2:])
    total = sum(unit.numel for unit in engine._sharded.units)
    if isinstance(before, dict):
        found = {name: (nbytes - before[name]) / total for name, nbytes in link.moved.items()}
    else:
        found = {"world": (link.moved - before) / total}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("mesh", "zero", "wanted"),
    [
        # 8 bits and a scale of 4 bytes for 256 elements; two gathers, all but the last block's
        ("world", WEIGHTS, {"world": (1.5 * 1.0157 + 2, 2 * 1.0157 + 2)}),
        ("world", GRADIENTS, {"world": (3 + 1.0157, 4 + 1.0157)}),
        # between nodes half of the elements: gradients in 4 bits, their sums in 8
        ("node", GRADIENTS, {"inside": (5, 6), "between": (0.765, 0.767)}),
        # one gather in 8 bits, gradients in 4
        ("copies", {**WEIGHTS, **GRADIENTS}, {"between": (0.765, 0.767)}),
        ("copies", {}, {"inside": (5, 6), "between": (2, 2)}),
    ],
    ids=["weights", "gradients", "gradients in the node", "both with copies", "copies unpacked"],
)
def test_packed_bytes_travel(mesh: str, zero: dict[str, Any], wanted: dict[str, tuple[float, float]]) -> None:
    env = GLOO if mesh == "world" else {}
    for found in run_workers(_bytes, 4, mesh, zero, env=env):
        print(found)
        for name, (low, high) in wanted.items():
            assert low <= found[name] <= high, (name, found)


def _losses(mesh: str, zero: dict[str, Any], steps: int) -> list[float]:
    per_node, group = MESHES[mesh]
    join_nodes(per_node)
    torch.manual_seed(1)
    data = [batch for _ in range(steps // 5) for batch in batches(5, 16)]
    found = []
    for chosen in ({}, {**group, **zero}):
        engine, *_ = zlaunch.initialize(
            model=net(width=64, depth=3), config=config(3, 4, zero=chosen, **BF16)
        )
        train_engine(engine, data)
        with torch.no_grad():
            loss = sum(loss_of(engine, batch) for batch in data[:5]) / 5
        found.append(float(loss))
        engine.destroy()
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_packed_weights_and_gradients(mesh: str) -> None:
    both = {**WEIGHTS, **GRADIENTS}
    for plain, packed in run_workers(_losses, 4, mesh, both, 60, env=GLOO):
        print(mesh, plain, packed)
        assert abs(packed - plain) <= 0.05 * plain


def _frozen() -> list[float]:
    join_nodes(4)
    worst = []
    for zero in (FROZEN, WEIGHTS):
        model = net(width=64, depth=2)
        model.layers[0].requires_grad_(False)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        engine, *_ = zlaunch.initialize(model=model, config=config(3, 4, zero=zero))
        with torch.no_grad(), zlaunch.zero.GatheredParameters(list(engine.module.parameters())):
            off = {
                name: float((p - wanted[name]).abs().max()) for name, p in engine.module.named_parameters()
            }
        worst += [max(off[f"layers.{i}.up.weight"] for i in (0,)), off["layers.1.up.weight"]]
        engine.destroy()
    return worst


def test_frozen_parameters_alone() -> None:
    for frozen, trained, frozen_too, trained_too in run_workers(_frozen, 4):
        assert frozen > 0 and trained == 0 and frozen_too > 0 and trained_too > 0


def _refusals() -> list[str]:
    zlaunch.init_distributed()
    found = []
    for stage, zero in (
        (2, WEIGHTS),
        (0, GRADIENTS),
        (3, {"zeropp_loco_param": {}}),
        (3, {**GRADIENTS, "zeropp_loco_param": {"err_beta": 1.0}}),
    ):
        with pytest.raises(ConfigError) as caught:
            zlaunch.initialize(model=net(), config=config(stage, 4, zero=zero))
        found.append(str(caught.value))
    return found


def test_what_makes_no_sense_is_refused() -> None:
    (found,) = run_workers(_refusals, 1)
    for text, part in zip(
        found,
        ("needs stage 3", "needs a stage from 1 on", "needs zero_quantized_gradients", "below 1"),
        strict=True,
    ):
        assert part in text
