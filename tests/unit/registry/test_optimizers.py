"""Test optimizers and schedulers built from a config's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zlaunch.runtime.optim.lion import Lion
from zlaunch.runtime.optim.registry import build_optimizer, build_scheduler
from zlaunch.runtime.optim.schedules import SCHEDULES

MODEL = torch.nn.Linear(1, 1)


def groups() -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.ones(3))]}]


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Adam", {}, torch.optim.AdamW),
        ("adam", {"adam_w_mode": True}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("AdamW", {}, torch.optim.AdamW),
        ("ADAMW", {"adam_w_mode": False}, torch.optim.AdamW),
        ("SGD", {"lr": 0.1}, torch.optim.SGD),
        ("sgd", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("Adagrad", {}, torch.optim.Adagrad),
        ("RAdam", {}, torch.optim.RAdam),
    ],
)
def test_the_type_names_the_class(kind: str, params: dict[str, Any], expected: type) -> None:
    assert type(build_optimizer(kind, params, groups(), MODEL)) is expected


def test_adam_takes_the_parameters_of_deepspeed_and_its_default_of_no_decay() -> None:
    params = {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-4, "torch_adam": True, "bias_correction": True}
    made = build_optimizer("Adam", params, groups(), MODEL)
    group = made.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.25,
        (0.5, 0.75),
        1e-4,
        0.0,
    )
    assert (
        build_optimizer("AdamW", {"weight_decay": 0.1}, groups(), MODEL).param_groups[0]["weight_decay"]
        == 0.1
    )
    assert params["betas"] == [0.5, 0.75] and "torch_adam" in params, "the caller's dict stays as it is"


def test_adam_of_the_config_steps_as_torch_adamw_does() -> None:
    ours, theirs = groups(), groups()
    made = build_optimizer("Adam", {"lr": 0.1, "weight_decay": 0.3}, ours, MODEL)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3)
    for optimizer, owner in ((made, ours), (reference, theirs)):
        for step in range(3):
            owner[0]["params"][0].grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
            optimizer.step()
    assert torch.equal(ours[0]["params"][0], theirs[0]["params"][0])


def test_settings_of_a_group_win_over_those_of_the_config() -> None:
    own = [{**groups()[0], "lr": 0.5, "weight_decay": 0.0}, groups()[0]]
    made = build_optimizer("AdamW", {"lr": 0.1, "weight_decay": 0.2}, own, MODEL)
    assert [(g["lr"], g["weight_decay"]) for g in made.param_groups] == [(0.5, 0.0), (0.1, 0.2)]


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("Nonesuch", {}, "optimizer.type: unknown 'Nonesuch'"),
        ("lr_scheduler", {}, "unknown"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, "false cannot be combined with amsgrad"),
        ("NAdam", {"bias_correction": True}, "bias_correction"),
        ("Adam", {"learning_rate": 1.0}, "learning_rate"),
        ("AdamW", {"lr": -1.0}, "does not accept"),
        ("Adagrad", {"lr": True}, "optimizer.params.lr: True is not a number"),
        ("Adagrad", {"lr": "fast"}, "optimizer.params.lr: 'fast' is not a number"),
        ("SGD", {"lr": 0.1, "betas": [0.9, 0.99]}, "betas"),
    ],
)
def test_bad_optimizers_are_value_errors(kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_optimizer(kind, params, groups(), MODEL)


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_our_schedulers_by_name(kind: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        "WarmupDecayLR": {"total_num_steps": 10},
        "WarmupCosineLR": {"total_num_steps": 10},
    }
    optimizer = build_optimizer("Adam", {}, groups(), MODEL)
    assert type(build_scheduler(kind, needed.get(kind, {}), optimizer)) is SCHEDULES[kind]


def test_torch_schedulers_by_name() -> None:
    optimizer = build_optimizer("SGD", {"lr": 1.0}, groups(), MODEL)
    made = build_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    assert type(made) is torch.optim.lr_scheduler.StepLR
    optimizer.step()
    made.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("Nonesuch", {}, "scheduler.type: unknown 'Nonesuch'"),
        ("math", {}, "math"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("OneCycle", {}, "cycle_min_lr"),
        ("StepLR", {}, "step_size"),
    ],
)
def test_bad_schedulers_are_value_errors(kind: str, params: dict[str, Any], words: str) -> None:
    optimizer = build_optimizer("SGD", {"lr": 1.0}, groups(), MODEL)
    with pytest.raises(ValueError, match=words):
        build_scheduler(kind, params, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lion_is_that_of_the_paper_in_every_dtype(dtype: torch.dtype) -> None:
    """Algorithm 2, line by line, in double precision."""
    torch.manual_seed(0)
    start = torch.randn(100).to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    value, average = start.double(), torch.zeros(100, dtype=torch.float64)
    for _ in range(5):
        gradient = torch.randn(100).to(dtype)
        parameter.grad = gradient
        optimizer.step()
        direction = (0.8 * average + 0.2 * gradient.double()).sign()
        value = value * (1 - 1e-2 * 0.1) - 1e-2 * direction
        average = 0.95 * average + 0.05 * gradient.double()
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(parameter.detach().double(), value, rtol=close, atol=close)
    torch.testing.assert_close(
        optimizer.state[parameter]["exp_avg"].double(), average, rtol=close, atol=close
    )
