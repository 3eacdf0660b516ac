"""Test the expert-parallel size that is chosen for "auto"."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import assert_equals_one_process, settings
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.config import load, resolve
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.mesh import MeshShape
from zlaunch.runtime.parallel.expert_size import choose_expert_size

AUTO = {"parallel": {"expert": "auto"}}


class _Mixture(nn.Module):
    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            zlaunch.Experts([nn.Linear(4, 4) for _ in range(count)]) for count in counts
        )


def _chosen(model: nn.Module, ranks: int, local: int, *, tensor: int = 1, **config: Any) -> tuple[int, str]:
    shape = MeshShape(data=ranks // tensor, tensor=tensor)
    return choose_expert_size(load({**AUTO, **config}), model, shape, local)


@pytest.mark.parametrize(
    ("counts", "ranks", "local", "tensor", "size"),
    [
        ((8,), 8, 8, 1, 8),
        ((64,), 4, 4, 1, 4),
        ((8,), 16, 8, 1, 8),  # one node's
        ((8,), 16, 16, 1, 8),
        ((6,), 4, 4, 1, 2),
        ((8, 12), 8, 8, 1, 4),
        ((8,), 8, 8, 2, 4),
        ((8,), 8, 4, 2, 2),
        ((8,), 6, 3, 1, 1),
        ((7,), 8, 8, 1, 1),
        ((8,), 1, 1, 1, 1),
        ((8,), 4, 1, 1, 1),  # a rank on each node
    ],
)
def test_the_largest_size_on_a_node_is_chosen(
    counts: tuple[int, ...], ranks: int, local: int, tensor: int, size: int
) -> None:
    found, why = _chosen(_Mixture(*counts), ranks, local, tensor=tensor)
    assert found == size
    experts = " and ".join(map(str, sorted(set(counts))))
    assert f"{'the largest' if size > 1 else 'no other'} size divides {experts} experts" in why.replace(
        " that", ""
    )
    assert f"{min(ranks, local) // tensor or 1} data-parallel rank" in why


def test_models_and_keys_that_do_not_allow_an_axis_get_none() -> None:
    size, why = _chosen(nn.Linear(4, 4), 4, 4)
    assert size == 1 and why == "the model has no modules called experts"
    lists = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    size, why = _chosen(lists, 4, 4)
    assert size == 1 and "wrap the modules of experts in zlaunch.Experts" in why
    size, why = _chosen(_Mixture(4), 4, 4, zero_optimization={"stage": 3, "shard_group": 2})
    assert size == 1 and "here: zero_optimization.shard_group: is not supported together with" in why
    with pytest.raises(ParameterError, match=r"no module matches no\.\*\.name"):
        _chosen(_Mixture(4), 4, 4, expert_parallel={"experts": ["no.*.name"]})


@needs_package("transformers")
def test_training_with_the_chosen_size_equals_one_process() -> None:
    assert_equals_one_process(["mixtral"], 4, [3], {"expert": "auto"}, attention="eager")


def _sizes(config: dict[str, Any], local: tuple[int, int], optimizer: str = "") -> tuple[int, int]:
    os.environ["LOCAL_WORLD_SIZE"] = str(local[join()])
    torch.manual_seed(0)
    model = _Mixture(4)
    own = getattr(torch.optim, optimizer)(model.parameters()) if optimizer else None
    engine, *_ = zlaunch.initialize(model=model, optimizer=own, config={**settings(3, 1, 2), **config})
    return engine.comm.mesh.expert, engine.comm.mesh.data


def test_ranks_agree_on_the_size_and_a_number_is_taken_as_it_is() -> None:
    assert run_workers(_sizes, 2, AUTO, (2, 2)) == [(2, 1)] * 2
    assert run_workers(_sizes, 2, AUTO, (2, 1)) == [(1, 2)] * 2
    assert run_workers(_sizes, 2, {"parallel": {"expert": 2}}, (2, 1)) == [(2, 1)] * 2
    assert run_workers(_sizes, 2, {}, (2, 2)) == [(1, 2)] * 2
    autoep = {"expert_parallel": {"enabled": True, "autoep_size": "auto"}}
    assert run_workers(_sizes, 2, autoep, (2, 2)) == [(2, 1)] * 2
    both = {**AUTO, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert run_workers(_sizes, 2, both, (2, 1)) == [(2, 1)] * 2
    assert run_workers(_sizes, 2, AUTO, (2, 2), "Adafactor") == [(1, 2)] * 2


def test_the_config_of_a_run_says_where_the_size_comes_from() -> None:
    batch = {"train_micro_batch_size_per_gpu": 1}
    effective = resolve(load({**AUTO, **batch}), world_size=4, expert_size=4, expert_size_from="4 experts")
    assert effective.config.parallel.expert == 4
    assert effective.sources["parallel.expert"] == "auto: 4 experts"
    assert "model's experts" in resolve(load({**AUTO, **batch}), world_size=4).sources["parallel.expert"]
    named = load({**AUTO, "expert_parallel": {"experts": ["layers.*"]}})
    assert not named.warnings
    number = resolve(load({"parallel": {"expert": 2}, **batch}), world_size=4, expert_size=2)
    assert number.config.parallel.expert == 2 and number.sources["parallel.expert"] == "<dict>"
