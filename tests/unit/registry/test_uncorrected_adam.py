"""Test Adam without bias correction outside of an engine, by its names and in the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zlaunch.compat.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam
from zlaunch.cuda_ops.arguments import AdamArgs
from zlaunch.cuda_ops.narrow_state import fresh
from zlaunch.cuda_ops.narrow_step import narrow_step
from zlaunch.cuda_ops.step import adam_step
from zlaunch.runtime.optim.registry import build_optimizer

LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.5, 0.75, 1e-4, 0.2
PARAMS = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
GRADS = [torch.linspace(-1, 2, 64, dtype=torch.float64) * (1 + step) for step in range(3)]
_NAMES: tuple[Any, Any] = FusedAdam, DeepSpeedCPUAdam  # calls make, by a metaclass
START = torch.linspace(-2, 2, 64, dtype=torch.float64)


def formula(*, decoupled: bool) -> Tensor:
    value, first, second = START.clone(), torch.zeros(64).double(), torch.zeros(64).double()
    for grad in GRADS:
        grad = grad if decoupled else grad + DECAY * value
        first = BETA1 * first + (1 - BETA1) * grad
        second = BETA2 * second + (1 - BETA2) * grad * grad
        value = value - LR * (first / (second.sqrt() + EPS) + (DECAY * value if decoupled else 0))
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("way", ["config", "FusedAdam", "DeepSpeedCPUAdam"])
def test_each_name_makes_the_formula(way: str, decoupled: bool, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(START.to(dtype, copy=True))
    made: Any
    fused, on_cpu = _NAMES
    if way == "config":
        section = {**PARAMS, "bias_correction": False, "adam_w_mode": decoupled}
        made = build_optimizer("Adam", section, [{"params": [parameter]}], torch.nn.Linear(1, 1))
    elif way == "FusedAdam":
        made = fused([parameter], bias_correction=False, adam_w_mode=decoupled, **PARAMS)
        assert isinstance(made, FusedAdam)
    else:
        made = on_cpu([parameter], bias_correction=False, adamw_mode=decoupled, **PARAMS)
        assert isinstance(made, DeepSpeedCPUAdam)
    assert made.param_groups[0]["bias_correction"] is False
    for grad in GRADS:
        parameter.grad = grad.to(dtype)
        made.step()
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6)
    wanted = formula(decoupled=decoupled)
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=rtol, atol=atol)
    assert made.state[parameter]["step"] == 3


def _args(**more: Any) -> AdamArgs:
    return AdamArgs(
        lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY, multiplier=0.5, decoupled=True, **more
    )


@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_the_kernels_on_the_cpu(kernels: str, out: torch.dtype | None, monkeypatch: Any) -> None:
    """With the 16-bit copy and without, compiled and as torch's operations."""
    from zlaunch.cuda_ops import host

    if kernels == "off":
        monkeypatch.setattr(host, "wanted", lambda tensor: False)
    master, first, second = START.float(), torch.zeros(64), torch.zeros(64)
    copy = None if out is None else torch.empty(64, dtype=out)
    for step, grad in enumerate(GRADS, 1):
        adam_step(master, first, second, 2 * grad.float(), copy, float(step), _args(corrected=False))
    torch.testing.assert_close(master.double(), formula(decoupled=True), rtol=1e-5, atol=1e-6)
    assert copy is None or torch.equal(copy, master.bfloat16())


def test_narrow_state() -> None:
    master = START.float()
    own: dict[str, Any] = {**fresh(master, "exp_avg", "bf16"), **fresh(master, "exp_avg_sq", "bf16")}
    pairs = [(own["exp_avg"], None), (own["exp_avg_sq"], None)]
    for step, grad in enumerate(GRADS, 1):
        args = _args(corrected=False)
        narrow_step(master, pairs, 2 * grad.float(), None, float(step), args, key=1, place=0)
    torch.testing.assert_close(master.double(), formula(decoupled=True), rtol=0.02, atol=0.01)


def test_the_cuda_kernels_get_coefficients_that_make_both_corrections_one() -> None:
    """``-expm1(step * log_beta)`` of the kernel is 1 for minus infinity, at any step."""
    rates = torch.tensor(_args(corrected=False).coefficients()[:2])
    for step in (1.0, 2.0, 1e6):
        assert (-torch.expm1(step * rates)).tolist() == [1.0, 1.0]
    assert _args(corrected=False).coefficients()[2:] == _args().coefficients()[2:]
    assert (-torch.expm1(torch.tensor(_args().coefficients()[:2]))).tolist() == pytest.approx([0.5, 0.25])
