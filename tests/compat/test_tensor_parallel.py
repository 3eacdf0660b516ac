"""Test what scripts and libraries say to DeepSpeed about ranks that share layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed import engine as alias
from zlaunch.compat.deepspeed import parallel
from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.compat.deepspeed.parallel import tp_model_init
from zlaunch.runtime.comm.given_groups import check_given_groups
from zlaunch.runtime.mesh import MeshShape

SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
PLAN = {"tensor_parallel": {"plan": {"0": "colwise", "1": "rowwise"}}}
SHARED = {"tensor_parallel": {"autotp_size": 2, **PLAN["tensor_parallel"]}}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def _said(noted: int | None, config: dict[str, Any], asked: dict[str, int]) -> str:
    join()
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    model = _model() if noted is None else tp_model_init(_model(), noted, torch.float32)
    if asked:
        AcceleratorState._shared_state["parallelism_config"] = ParallelismConfig(**asked)
    try:
        engine, *_ = alias.initialize(model=model, config=config)
    except zlaunch.ZlaunchError as error:
        return str(error)
    finally:
        AcceleratorState._shared_state.clear()
    sizes = parallel._get_model_parallel_world_size(), parallel._get_data_parallel_world_size()
    return f"{sizes} {engine.train_micro_batch_size_per_gpu()}"


@pytest.mark.parametrize(
    ("noted", "config", "asked", "said"),
    [
        (2, {**CONFIG, **SHARED}, {}, "(2, 1) 4"),
        (None, {**CONFIG, **SHARED}, {"tp_size": 2}, "(2, 1) 4"),
        (2, {**CONFIG, **PLAN}, {}, "(2, 1) 4"),
        (
            2,
            {**CONFIG, "parallel": {"tensor": 4}},
            {},
            "(tp_size=2) contradicts parallel.tensor",
        ),
        (
            1,
            {**CONFIG, **SHARED},
            {},
            "(tp_size=1) contradicts parallel.tensor of the config, which is 2",
        ),
        (None, {**CONFIG, **PLAN}, {"tp_size": 2}, "(2, 1) 4"),
        (2, CONFIG, {"tp_size": 4}, "ParallelismConfig(tp_size=4) contradicts tp_model_init(tp_size=2)"),
        (None, CONFIG, {"cp_size": 2}, "ParallelismConfig(cp_size=2): not supported"),
        (
            None,
            {
                **SHARED,
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 1,
            },
            {},
            "(2, 1) 4",
        ),
    ],
    ids=[
        "noted",
        "asked",
        "noted alone",
        "other size",
        "size 1",
        "asked alone",
        "two sizes",
        "context",
        "counted twice",
    ],
)
def test_sizes(noted: int | None, config: dict[str, Any], asked: dict[str, int], said: str) -> None:
    for found in run_workers(_said, 2, noted, config, asked):
        assert said in found


def test_a_config_of_another_size_and_a_group_are_refused_at_once() -> None:
    with pytest.raises(zlaunch.ConfigError, match=r"tp_size=4.* contradicts .*, which is 2"):
        tp_model_init(_model(), 4, torch.float32, {**CONFIG, **SHARED})
    with pytest.raises(NotInZlaunch, match="tp_group"):
        tp_model_init(_model(), 2, torch.float32, tp_group=object())


class _Groups:
    """Returns groups as the ``mpu`` of DeepSpeed's AutoTP example does."""

    def __init__(self, tensor: list[list[int]], data: list[list[int]]) -> None:
        self.tensor, self.data = (self._own(groups) for groups in (tensor, data))

    def _own(self, groups: list[list[int]]) -> Any:
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in groups]
        return next(group for ranks, group in made if torch.distributed.get_rank() in ranks)

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_group(self) -> Any:
        return self.data


def _with_mpu(tensor: list[list[int]], data: list[list[int]], config: dict[str, Any]) -> str:
    join()
    try:
        engine, *_ = alias.initialize(model=_model(), config=config, mpu=_Groups(tensor, data))
    except zlaunch.ZlaunchError as error:
        return str(error)
    assert parallel._get_model_parallel_world_size() == len(tensor[0])
    loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    engine.step()
    return "trained"


def test_the_groups_of_an_mpu_are_those_of_the_config() -> None:
    together, apart = [[0, 1]], [[0], [1]]
    assert run_workers(_with_mpu, 2, together, apart, {**CONFIG, **SHARED}) == ["trained"] * 2
    assert run_workers(_with_mpu, 2, apart, together, CONFIG) == ["trained"] * 2
    refused = run_workers(_with_mpu, 2, together, apart, CONFIG)
    assert refused[1].startswith(
        "mpu.get_model_parallel_group(): rank 1 is in a group of ranks [0, 1], but the"
    )
    (refused, _) = run_workers(_with_mpu, 2, apart, apart, {**CONFIG, **SHARED})
    assert "into one of [0, 1]: set parallel.tensor in the config to 1" in refused
    with pytest.raises(TypeError, match="mpu is object, which has none of the methods get_tensor"):
        check_given_groups(object(), MeshShape(1), 0)


def _groups() -> list[Any]:
    rank = join()
    from tests.runtime.expert_parallel.test_by_hand import _Network

    section = {"experts": ["layers.*.experts"]}
    config = {**CONFIG, "parallel": {"expert": 2}, "expert_parallel": section}
    alias.initialize(model=_Network("free"), config=config)
    found: list[Any] = [parallel._get_expert_parallel_world_size("ep_size_2")]
    for group in (parallel._get_expert_parallel_group(), parallel._get_expert_data_parallel_group()):
        found.append(torch.distributed.get_process_group_ranks(group))
    assert parallel._get_expert_parallel_rank() == rank % 2
    assert parallel._get_expert_data_parallel_rank() == rank // 2
    assert parallel._get_expert_data_parallel_world_size() == 2
    with pytest.raises(ValueError, match="the only group is 'ep_size_2'"):
        parallel._get_expert_parallel_group("ep_size_4")
    return found


def test_groups_of_experts() -> None:
    assert run_workers(_groups, 4) == [
        [2, [0, 1], [0, 2]],
        [2, [0, 1], [1, 3]],
        [2, [2, 3], [0, 2]],
        [2, [2, 3], [1, 3]],
    ]
