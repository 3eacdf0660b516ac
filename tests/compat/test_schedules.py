"""Test the orders of a pipeline's passes, and curricula, that scripts written for DeepSpeed ask for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.compat.deepspeed import pipe_schedule
from zlaunch.compat.deepspeed.curriculum import CurriculumScheduler
from zlaunch.compat.deepspeed.pipe_schedule import PipeInstruction, PipeSchedule, TrainSchedule

OF_0_19_8 = """
[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]
[SendActivation(buffer_id=0)]
[LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)]
[RecvGrad(buffer_id=0), SendActivation(buffer_id=1), BackwardPass(buffer_id=0)]
[]
[RecvGrad(buffer_id=1), BackwardPass(buffer_id=1), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
"""
"""Holds the output of DeepSpeed 0.19.8 for two micro-batches on the first of two stages."""


def _steps(schedule: PipeSchedule) -> list[list[PipeInstruction]]:
    return list(schedule)


def _names(instructions: list[PipeInstruction], *names: str) -> list[str]:
    return [each.name for each in instructions if not names or each.name in names]


def test_the_order_is_deepspeeds() -> None:
    assert "\n".join(map(repr, _steps(TrainSchedule(2, 2, 0)))) == OF_0_19_8.strip()


@given(st.integers(1, 9), st.integers(1, 6))
def test_neighbours_send_what_the_other_receives(micro_batches: int, stages: int) -> None:
    for kind, pairs in (
        (TrainSchedule, [("SendActivation", "RecvActivation", 1), ("SendGrad", "RecvGrad", -1)]),
        (pipe_schedule.InferenceSchedule, [("SendActivation", "RecvActivation", 1)]),
    ):
        steps = [_steps(kind(micro_batches, stages, stage)) for stage in range(stages)]
        for stage in range(stages):
            for sent, received, distance in pairs:
                if not 0 <= stage + distance < stages:
                    assert not any(_names(each, sent) for each in steps[stage])
                    continue
                for mine, theirs in zip(steps[stage], steps[stage + distance], strict=True):
                    assert len(_names(mine, sent)) == len(_names(theirs, received)) <= 1


@given(st.integers(1, 9), st.integers(1, 6), st.data())
def test_each_micro_batch_has_both_passes(micro_batches: int, stages: int, data: st.DataObject) -> None:
    schedule = TrainSchedule(micro_batches, stages, data.draw(st.integers(0, stages - 1)))
    waiting = list[int]()
    passes = 0
    for instructions in _steps(schedule):
        for each in instructions:
            if each.name == "ForwardPass":
                assert each.kwargs["buffer_id"] not in waiting  # or it would be overwritten
                waiting.append(each.kwargs["buffer_id"])
            if each.name == "BackwardPass":
                assert waiting.pop(0) == each.kwargs["buffer_id"]
                passes += 1
    assert passes == micro_batches and waiting == []
    last = _names(_steps(schedule)[-1])
    assert last[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


def test_data_parallel_steps() -> None:
    schedule = pipe_schedule.DataParallelSchedule(2, 1, 0)
    steps = [_names(each) for each in _steps(schedule)]
    assert steps[0] == ["LoadMicroBatch", "ForwardPass", "BackwardPass"]
    assert steps[1] == [*steps[0], "ReduceGrads", "OptimizerStep"] and schedule.num_pipe_buffers() == 1
    with pytest.raises(NotImplementedError, match="DualPipeVSchedule is not supported"):
        pipe_schedule.DualPipeVSchedule(2, 1, 0)


def test_names_are_where_deepspeed_has_them(deepspeed: Any) -> None:
    from deepspeed.runtime.data_pipeline import curriculum_scheduler
    from deepspeed.runtime.pipe import schedule

    assert schedule.TrainSchedule is TrainSchedule
    assert curriculum_scheduler.CurriculumScheduler is CurriculumScheduler


# -- curricula


def _curriculum(kind: str, **settings: Any) -> CurriculumScheduler:
    return CurriculumScheduler(
        {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": kind, "schedule_config": settings}
    )


@pytest.mark.parametrize(
    ("kind", "settings", "difficulties"),
    [
        # steps 0, 1, 25, 50, 99, 100 and 1000; DeepSpeed 0.19.8 returns the same
        ("fixed_linear", {"total_curriculum_step": 100, "difficulty_step": 8}, [8, 8, 16, 32, 56, 64, 64]),
        (
            "fixed_root",
            {"total_curriculum_step": 100, "difficulty_step": 16, "root_degree": 2},
            [16, 16, 32, 32, 48, 64, 64],
        ),
        ("fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [24, 99]}, [1, 1, 2, 2, 2, 3, 3]),
    ],
)
def test_difficulties(kind: str, settings: dict[str, Any], difficulties: list[int]) -> None:
    steps = (0, 1, 25, 50, 99, 100, 1000)
    curriculum = _curriculum(kind, **settings)
    assert [curriculum.get_difficulty(step) for step in steps] == difficulties
    assert [curriculum.update_difficulty(step) for step in steps][-1] == difficulties[-1]
    assert curriculum.state["current_difficulty"] == difficulties[-1]


def test_a_custom_curriculum() -> None:
    curriculum = _curriculum("custom")
    with pytest.raises(RuntimeError, match="call set_custom_get_difficulty first"):
        curriculum.get_difficulty(1)
    curriculum.set_custom_get_difficulty(lambda step: step + 5)
    assert curriculum.update_difficulty(10) == 15


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("fixed_linear", {"difficulty_step": 8}, "needs schedule_config.total_curriculum_step"),
        ("fixed_discrete", {"difficulty": [1], "max_step": [2]}, "one element more than max_step"),
        ("sometimes", {}, "'sometimes' is not one of fixed_discrete, fixed_linear, fixed_root, custom"),
    ],
)
def test_mistakes(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _curriculum(kind, **settings)
    with pytest.raises(ValueError, match="min_difficulty is missing"):
        CurriculumScheduler({})
