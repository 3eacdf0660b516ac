"""Test the numbers of places on axes, with those that DeepSpeed's own tests of its topologies have."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed.pipe import (
    PipeDataParallelTopology,
    PipelineModule,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    partition_balanced,
    partition_uniform,
    prime_factors,
)
from zlaunch.runtime.errors import ParameterError


def test_the_last_axis_is_the_fastest() -> None:
    grid = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert [grid.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == [*range(6)]
    assert grid.world_size() == 6 and grid.get_axis_names() == ["row", "col"]
    assert (grid.get_dim("row"), grid.get_dim("col"), grid.get_dim("depth")) == (2, 3, 0)
    assert (grid.get_coord(5).row, grid.get_coord(5).col) == (1, 2)
    assert grid.get_axis_list("row", 1) == [3, 4, 5] and grid.get_axis_list("col", 0) == [0, 3]


def test_ranks_that_differ_on_one_axis_alone() -> None:
    cube = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert cube.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cube.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert cube.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cube.get_axis_comm_lists("row") == []


def test_each_axis_has_its_own_size() -> None:
    stages = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert (stages.get_dim("pipe"), stages.get_dim("data")) == (2, 3)
    shared = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
    assert {axis: shared.get_dim(axis) for axis in shared.axes} == {"pipe": 2, "data": 4, "model": 3}
    assert shared.get_rank(pipe=1, data=2, model=1) == 12 + 2 * 3 + 1


def test_ranks_are_found_and_named_by_their_places() -> None:
    cube = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert cube.filter_match(pipe=0, data=1) == [2, 3] and cube.filter_match(model=1, pipe=1) == [5, 7]
    assert [cube.get_rank_repr(rank) for rank in (0, 7)] == ["model_00", "model_01"]
    assert cube.get_rank_repr(6, omit_axes=[], inner_sep="=", outer_sep=",") == "pipe=01,data=01,model=00"


@pytest.mark.parametrize("number", range(1, 40))
def test_prime_factors(number: int) -> None:
    factors = prime_factors(number)
    assert math.prod(factors) == number
    assert all(factor % smaller for factor in factors for smaller in range(2, factor))


def test_parts_need_a_positive_number() -> None:
    for divide in (partition_uniform, lambda items, parts: partition_balanced([1.0] * items, parts)):
        with pytest.raises(ValueError, match="num_parts must be 1 or more, got 0"):
            divide(3, 0)
    assert partition_balanced([0.0] * 4, 2) == [0, 2, 4]


def test_there_are_no_prime_factors_of_nothing() -> None:
    assert prime_factors(2**31 - 1) == [2**31 - 1]
    with pytest.raises(ValueError, match="0 has no prime factors"):
        prime_factors(0)


def _sum(group: Any) -> int:
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


def _grid() -> dict[str, Any]:
    join()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    module = PipelineModule([nn.Linear(2, 2) for _ in range(4)], num_stages=2)
    plain = module.mpu()
    assert module.mpu() is plain
    assert copy.deepcopy(module)._grid is None
    for axis in ("data", "model"):
        line = PipelineParallelGrid(ProcessTopology([axis], [4]))
        rank = dist.get_rank()
        assert (line.get_stage_id(), line.pp_group, _sum(line.get_pipe_parallel_group())) == (0, [rank], rank)
        along = {"data": line.get_data_parallel_group(), "model": line.get_slice_parallel_group()}
        assert [_sum(along[name]) for name in ("data", "model")] == [
            6 if name == axis else rank for name in along
        ]
        assert line.get_model_parallel_world_size() == (1 if axis == "data" else 4)
    with pytest.raises(ParameterError, match="has 3 ranks, and the run 4"):
        PipelineParallelGrid(PipeDataParallelTopology(num_pp=3, num_dp=1))
    return {
        "stage": grid.get_pipe_parallel_rank(),
        "last": grid.is_last_stage,
        "slice": grid.get_slice_parallel_rank(),
        "data": grid.get_data_parallel_group_ranks(),
        "pipe": grid.pp_group,
        "pipe sum": _sum(grid.get_pipe_parallel_group()),
        "slice sum": _sum(grid.get_slice_parallel_group()),
        "model sum": _sum(grid.get_model_parallel_group()),
        "data sum": _sum(grid.get_data_parallel_group()),
        "of stage 1": grid.stage_to_global(1),
        "p2p": grid.p2p_groups[grid.get_global_rank()],
        "plain": [plain.get_stage_id(), plain.get_data_parallel_id(), _sum(plain.get_data_parallel_group())],
    }


def test_a_grid_has_the_groups_of_each_axis() -> None:
    ranks = run_workers(_grid, 4)
    assert [each["stage"] for each in ranks] == [0, 0, 1, 1]
    assert [each["last"] for each in ranks] == [False, False, True, True]
    assert [each["slice"] for each in ranks] == [0, 1, 0, 1]
    assert [each["data"] for each in ranks] == [[0], [1], [2], [3]]
    assert [each["pipe"] for each in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["pipe sum"] for each in ranks] == [2, 4, 2, 4]
    assert [each["slice sum"] for each in ranks] == [1, 1, 5, 5]
    assert [each["model sum"] for each in ranks] == [6, 6, 6, 6]
    assert [each["data sum"] for each in ranks] == [0, 1, 2, 3]
    assert [each["of stage 1"] for each in ranks] == [2, 3, 2, 3]
    assert [each["p2p"] for each in ranks] == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert [each["plain"] for each in ranks] == [[0, 0, 1], [0, 1, 1], [1, 0, 5], [1, 1, 5]]
