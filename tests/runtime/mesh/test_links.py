"""Test what travels inside nodes and between them, and which divisions of the ranks are refused."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import batches, config, loss_of, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.comm import nodes as choice
from zlaunch.runtime.comm.nodes import Mesh, NodeRanks, divide
from zlaunch.runtime.comm.two_hops import BETWEEN, INSIDE
from zlaunch.runtime.config import ConfigError
from zlaunch.runtime.errors import UnsupportedError

WIDTH, DEPTH = 96, 8
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _moved(zero: dict[str, Any], accumulation: int) -> dict[int, dict[str, float]]:
    """Elements in the third step over the number of parameters (with padding), by stage and class of link."""
    join_nodes(2)
    found = {}
    for stage in range(4):
        engine, *_ = zlaunch.initialize(
            model=net(width=WIDTH, depth=DEPTH), config=config(stage, 4, accumulation, zero=zero)
        )
        data = batches(3, 4 * 4 * accumulation)
        train_engine(engine, data[:2])
        link: Any = engine.comm.link
        before = link.moved
        train_engine(engine, data[2:])
        total = sum(unit.numel for unit in engine.units) * 4
        found[stage] = {
            name: (nbytes - before[name]) / total for name, nbytes in link.moved.items() if nbytes
        }
        engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("env", [{}, pytest.param(GLOO, marks=pytest.mark.exhaustive)], ids=["", "gloo"])
def test_what_travels_with_the_group_s_shards(env: dict[str, str]) -> None:
    """Check the volume: of N elements a rank has N / 2, and an all-reduce of those counts twice."""
    for found in run_workers(_moved, 4, {"shard_group": "node"}, 1, env=env):
        assert found[0] == {BETWEEN: 2.0}
        assert found[1] == found[2] == {INSIDE: 2.0, BETWEEN: 1.0}
        assert found[3][BETWEEN] == 1.0 and 2.5 < found[3][INSIDE] <= 3.0


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_travels_with_copies(accumulation: int) -> None:
    """Between nodes goes half of what stage 3 gathers once a step, and half of each reduction."""
    for found in run_workers(_moved, 4, {"zero_hpz_partition_size": 2}, accumulation):
        assert found[1] == {INSIDE: 2.0, BETWEEN: 1.0}
        assert found[3][BETWEEN] == 0.5 + 0.5 * accumulation
        assert 2.5 * accumulation < found[3][INSIDE] <= 3.0 * accumulation


def test_divisions() -> None:
    nodes = [NodeRanks("a", range(4)), NodeRanks("b", range(4, 8))]
    assert divide("node", "key", nodes) == Mesh(8, 4)
    assert divide(2, "key", nodes).shard_groups() == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert divide(4, "key", nodes).replica_groups() == [range(i, 8, 4) for i in range(4)]
    assert divide(8, "key", nodes).count == 1
    with pytest.raises(ConfigError, match="key: 3 does not divide the 8 ranks; possible sizes: 1, 2, 4, 8"):
        divide(3, "key", nodes)
    uneven = [NodeRanks("a", range(4)), NodeRanks("b", range(4, 6))]
    with pytest.raises(ConfigError, match="same number of ranks on each node; a has 4, b has 2"):
        divide("node", "key", uneven)
    with pytest.raises(
        ConfigError,
        match="groups of 3 ranks would split nodes; a has 4, b has 2; possible sizes: 1, 2, 6",
    ):
        divide(3, "key", uneven)


def _refused(zero: dict[str, Any], env: dict[str, list[str]]) -> str:
    rank = int(os.environ["RANK"])
    os.environ.update({name: values[rank] for name, values in env.items()})
    zlaunch.init_distributed()
    with pytest.raises(ConfigError) as caught:
        zlaunch.initialize(model=net(), config=config(3, 4, zero=zero))
    return str(caught.value)


def test_what_cannot_be_divided_is_refused_on_every_rank() -> None:
    uneven = {"LOCAL_RANK": ["0", "1", "0"], "LOCAL_WORLD_SIZE": ["2", "2", "1"]}
    for text in run_workers(_refused, 3, {"shard_group": "node"}, uneven):
        assert "zero_optimization.shard_group" in text and "has 2" in text and "has 1" in text
    for text in run_workers(_refused, 3, {"mics_shard_size": 2}, {}):
        assert "zero_optimization.mics_shard_size: 2 does not divide the 3 ranks" in text
    apart = {"LOCAL_RANK": ["0", "0", "1"], "LOCAL_WORLD_SIZE": ["2", "1", "2"]}
    for text in run_workers(_refused, 3, {"shard_group": "node"}, apart):
        assert "numbered node by node" in text


def _chosen(per_node: int, bandwidths: list[float], sizes: list[int]) -> tuple[str, int]:
    """Return what "auto" chooses where links inside and between nodes have these bandwidths."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = (
        (str(rank - sum(sizes[:1]) * (rank >= sizes[0])), str(sizes[rank >= sizes[0]]))
        if sizes
        else (str(rank % per_node), str(per_node))
    )
    zlaunch.init_distributed()
    measured = iter(bandwidths)
    choice._bandwidth = lambda comm, link: next(measured)
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 4, zero={"shard_group": "auto"}))
    train_engine(engine, batches(2, 24))
    link = engine.comm.link
    found = type(link).__name__, engine.units[0].layout.world_size
    engine.destroy()
    assert next(measured, None) is None, "both are measured, where there is a choice"
    return found


@pytest.mark.parametrize(
    ("world", "per_node", "bandwidths", "sizes", "wanted"),
    [
        (2, 1, [], [], ("RankLink", 2)),
        (2, 2, [], [], ("RankLink", 2)),
        (3, 0, [], [2, 1], ("RankLink", 3)),
        (4, 2, [10.0, 1.0], [], ("TwoHops", 4)),
        (4, 2, [10.0, 9.0], [], ("RankLink", 4)),
    ],
    ids=["a rank a node", "one node", "unequal nodes", "slow between", "fast between"],
)
def test_auto_chooses_by_the_links(
    world: int, per_node: int, bandwidths: list[float], sizes: list[int], wanted: tuple[str, int]
) -> None:
    assert run_workers(_chosen, world, per_node, bandwidths, sizes) == [wanted] * world


def _measured() -> list[float]:
    join_nodes(2)
    found: list[float] = []
    measure = choice._bandwidth

    def noted(comm: Any, link: Any) -> float:
        found.append(measure(comm, link))
        return found[-1]

    choice._bandwidth = noted
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 4, zero={"shard_group": "auto"}))
    engine.destroy()
    return found


def test_all_ranks_measure_the_same() -> None:
    first, *others = run_workers(_measured, 4)
    assert len(first) == 2 and min(first) > 0 and all(each == first for each in others)


def _values_set_by_hand() -> list[float]:
    """Parameters are written in ways that pass by the optimizer, and read by all ranks."""
    from zlaunch.compat.fp32_access import safe_set_full_fp32_param

    join_nodes(2)
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 4, zero={"zero_hpz_partition_size": 2}))
    data = batches(1, 16)
    train_engine(engine, data)
    layers: Any = engine.module.layers
    weight = layers[0].up.weight
    seen = []
    with zlaunch.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        if engine.global_rank == 0:
            weight.fill_(2.0)
    with zlaunch.zero.GatheredParameters([weight]):
        seen.append(float(weight.double().mean()))
    safe_set_full_fp32_param(weight, torch.full((96, 24), 3.0))
    with zlaunch.zero.GatheredParameters([weight]):
        seen.append(float(weight.double().mean()))
    engine.destroy()
    return seen


def test_copies_follow_values_that_are_set_by_hand() -> None:
    assert run_workers(_values_set_by_hand, 4) == [[2.0, 3.0]] * 4


def _handles(zero: dict[str, Any]) -> list[float]:
    """Compare what the whole-parameter access returns with what the model has."""
    from zlaunch.compat.fp32_access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_set_local_fp32_param,
    )

    join_nodes(2)
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 4, zero=zero))
    data = batches(2, 16)
    train_engine(engine, data[:1])
    engine.backward(loss_of(engine, data[1][engine.global_rank * 4 : engine.global_rank * 4 + 4]))
    layers: Any = engine.module.layers
    weight = layers[0].up.weight
    value, grad = safe_get_full_fp32_param(weight), safe_get_full_grad(weight)
    assert value is not None and grad is not None
    with zlaunch.zero.GatheredParameters([weight]):
        off = float((value - weight).abs().max())
    if zero:
        with pytest.raises(UnsupportedError, match="safe_set_full_fp32_param"):
            safe_set_local_fp32_param(weight, torch.zeros(1))
    norm = float(grad.double().norm())
    engine.destroy()
    return [off, norm]


@pytest.mark.exhaustive
def test_whole_parameters_are_read_once() -> None:
    (wanted, *_) = run_workers(_handles, 4, {})
    for zero in ({"shard_group": "node"}, {"zero_hpz_partition_size": 2}):
        for off, norm in run_workers(_handles, 4, zero):
            assert off == 0 and norm == pytest.approx(wanted[1], rel=1e-5)


def _one_rank_looks(stage: int) -> float:
    """Rank 0 reads a parameter that stays whole while the others wait for it elsewhere."""
    join_nodes(2)
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 4, zero={"zero_hpz_partition_size": 2}))
    data = batches(3, 16)
    train_engine(engine, data[:2])
    link: Any = engine.comm.link
    gather = link.outer.all_gather

    def late(*arguments: Any) -> Any:
        time.sleep(0.2 if engine.global_rank >= 2 else 0.0)
        return gather(*arguments)

    link.outer.all_gather = late
    train_engine(engine, data[2:])
    layers: Any = engine.module.layers
    seen = float(layers[0].up.weight.sum()) if engine.global_rank == 0 else 0.0
    torch.distributed.barrier()
    engine.destroy()
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("env", [{}, GLOO], ids=["", "gloo"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_leaves_nothing_to_begin(stage: int, env: dict[str, str]) -> None:
    assert run_workers(_one_rank_looks, 4, stage, env=env)[0] != 0


def _saved_bytes(folder: str, zero: dict[str, Any]) -> int:
    join_nodes(2)
    engine, *_ = zlaunch.initialize(model=net(width=96, depth=4), config=config(3, 4, zero=zero))
    train_engine(engine, batches(1, 16))
    engine.save_checkpoint(folder, tag="x")
    engine.destroy()
    return sum(path.stat().st_size for path in Path(folder, "x").glob("*.safetensors"))


@pytest.mark.exhaustive
def test_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    whole, group, copies = (
        run_workers(_saved_bytes, 4, str(tmp_path / str(i)), zero)[0]
        for i, zero in enumerate(({}, {"shard_group": "node"}, {"zero_hpz_partition_size": 2}))
    )
    assert abs(group - whole) < 0.05 * whole and abs(copies - whole) < 0.05 * whole


def _part_as_deepspeed_has_it(zero: dict[str, Any]) -> str:
    from zlaunch.compat.deepspeed.parameters import _own

    join_nodes(2)
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 4, zero=zero))
    layers: Any = engine.module.layers
    with pytest.raises(UnsupportedError) as caught:
        _own(layers[0].up.weight)
    engine.destroy()
    return str(caught.value)


def test_parts_that_other_ranks_keep_are_not_handed_out() -> None:
    for text in run_workers(_part_as_deepspeed_has_it, 4, {"zero_hpz_partition_size": 2}):
        assert "ds_tensor is not available" in text and "GatheredParameters" in text


def _in_place_first() -> bool:
    """Gather from a tensor's own slice, which leaves no copy, then from other memory."""
    join_nodes(2)
    settings = config(3, 4, zero={"zero_hpz_partition_size": 2})
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(64, 64, bias=False), config=settings)
    (unit,), comm = engine.units, engine.comm
    wanted = torch.arange(unit.numel, dtype=torch.float32)
    own = wanted[unit.start : unit.stop]
    found = []
    for in_place in (True, False):
        full = comm.empty(unit.numel, torch.float32).zero_()
        if in_place:
            full[unit.start : unit.stop] = own
        source = full[unit.start : unit.stop] if in_place else own.clone()
        comm.all_gather(full, source, unit.tag).wait()
        comm.drain()
        found.append(torch.equal(full, wanted))
    engine.destroy()
    return all(found)


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_a_gather_in_place_leaves_no_copy_behind(env: dict[str, str]) -> None:
    assert run_workers(_in_place_first, 4, env=env) == [True] * 4
