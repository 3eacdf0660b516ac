"""Test the numbers of places on axes, with those that DeepSpeed's own tests of its topologies have."""

from __future__ import annotations

from zlaunch.compat.deepspeed.pipe import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


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
