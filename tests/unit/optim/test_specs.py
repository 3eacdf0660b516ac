"""Test the rows of optimizer_specs against the classes, kernels and models that they name."""

from __future__ import annotations

import inspect
from importlib.util import find_spec as find_package
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zlaunch.cuda_ops.step import rule_of
from zlaunch.runtime.config.optimizers import Params, fixed_arguments, optimizer_models
from zlaunch.runtime.offload.manager import mean_state_count
from zlaunch.runtime.optim.collective import CollectiveStep
from zlaunch.runtime.optim.registry import build_optimizer, collective_step_of, steps_elements
from zlaunch.runtime.optimizer_specs import (
    IN_CONFIG,
    KERNEL_NAMES,
    SPECS,
    USE_ELEMENTWISE,
    OptimizerSpec,
    can_read,
    find_by_type,
    find_spec,
    listed,
    load_object,
)

WITH_CLASS = [
    spec
    for spec in SPECS
    if spec.classes and not spec.refused and find_package(spec.classes[0].partition(".")[0])
]
MODEL = nn.Linear(2, 2)


def name_of(spec: OptimizerSpec) -> str:
    return spec.name


def class_of(spec: OptimizerSpec) -> Any:
    return load_object(spec.classes[0])


@pytest.mark.parametrize("spec", WITH_CLASS, ids=name_of)
def test_a_row_describes_its_class(spec: OptimizerSpec) -> None:
    optimizer = class_of(spec)([nn.Parameter(torch.ones(2, 3))])
    assert isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ == spec.name
    assert spec.has_kernel == (rule_of(optimizer) is not None)
    assert steps_elements(optimizer) == (spec.needs == "element")
    step = collective_step_of(optimizer)
    assert step is (load_object(spec.step) if spec.step else None)
    assert step is None or issubclass(step, CollectiveStep)
    derived = type(spec.name, (type(optimizer),), {})([nn.Parameter(torch.ones(2, 3))])
    assert not steps_elements(derived) and collective_step_of(derived) is None, "it may step in another way"
    if spec.arguments:
        assert issubclass(optimizer_models()[spec.name], Params)


@pytest.mark.parametrize("kind", IN_CONFIG)
def test_auto_is_the_default_of_the_class(kind: str) -> None:
    parameters = inspect.signature(class_of(IN_CONFIG[kind])).parameters
    ours = {"eps": "adam_eps"} if kind == "Muon" else {}
    for name, value in IN_CONFIG[kind].defaults.items():
        default = parameters[ours.get(name, name)].default
        assert (list(default) if isinstance(default, tuple) else default) == value, name


@pytest.mark.parametrize("kind", [kind for kind, spec in IN_CONFIG.items() if spec.states])
def test_the_states_are_those_after_a_step(kind: str) -> None:
    spec = IN_CONFIG[kind]
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = build_optimizer(
        kind, {"lr": 1e-3, **(spec.estimated or {})}, [{"params": [parameter]}], MODEL
    )
    if spec.needs == "ranks":  # their states exist only inside an engine
        assert mean_state_count(optimizer, torch.numel) == len(spec.states)
        return
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    state = optimizer.state[parameter]
    kept = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    assert kept == set(spec.states)


def test_rows_are_found_by_name() -> None:
    assert len({(spec.name, spec.classes) for spec in SPECS}) == len(SPECS)
    assert len({spec.name for spec in SPECS if spec.in_config == "supported"}) == len(IN_CONFIG)
    assert find_by_type("ADAMW") is IN_CONFIG["AdamW"] and find_by_type("lbfgs") is None
    lamb, refused = find_spec("LAMB"), find_spec("LBFGS")
    assert lamb is IN_CONFIG["Lamb"] and refused is not None and refused.refused
    assert find_spec("adamw") is None, "class names have one spelling"


def test_only_adam_and_adamw_read_each_others_state() -> None:
    others = {(a, b) for a in IN_CONFIG for b in IN_CONFIG if a != b and can_read(a, b)}
    assert others == {("Adam", "AdamW"), ("AdamW", "Adam")}
    assert can_read("Own", "Own") and not can_read("Own", "Adam")


def test_advice_is_made_from_the_rows() -> None:
    assert USE_ELEMENTWISE == "use an element-wise optimizer (Adam, AdamW, SGD, Lion)"
    assert listed(KERNEL_NAMES, "or") == "Adam, AdamW, SGD or Lion" and listed(["Lion"], "or") == "Lion"


def test_arguments_without_effect_stay_away_from_the_class() -> None:
    assert fixed_arguments("OneBitAdam") == {"bias_correction", "cuda_aware", "comm_backend_name"}
    assert fixed_arguments("Muon") == {"ns_method"} and not fixed_arguments("Adagrad")
