"""Test the arithmetic of the kernels, compiled for the CPU, against their twins in plain torch.

The ``compare_*`` functions run on any device; ``tests/gpu`` uses them too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from zlaunch.cuda_ops import loader
from zlaunch.cuda_ops.arguments import AdamArgs, LionArgs, SgdArgs
from zlaunch.cuda_ops.loss_scale import LossScaleState, update_loss_scale
from zlaunch.cuda_ops.norm import prepare_step, sum_of_squares, sums_of_squares
from zlaunch.cuda_ops.step import adam_step, lion_step, sgd_step

from .test_kernels_shim import CpuKernels, kernels_on_cpu, library

__all__ = ["kernels_on_cpu", "library"]  # fixtures

GUARD = 4
SIZES = (0, 1, 7, 64, 1000, 2051)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OUTS = (None, torch.bfloat16, torch.float16)
SPECIALS = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 65504.0, 65520.0, 3e38, -1e-8)


def values(numel: int, dtype: torch.dtype, device: str, *, offset: int = 0, specials: bool = False) -> Tensor:
    """Random numbers of all signs; ``offset`` elements behind an aligned address, four sevens behind them."""
    numbers = torch.randn(offset + numel + GUARD)
    numbers[offset + numel :] = 7
    if specials:
        for i, special in enumerate(SPECIALS):
            numbers[offset + 3 * i : offset + numel][:1] = special
    return numbers.to(device, dtype)[offset : offset + numel]


def assert_guarded(tensor: Tensor) -> None:
    """Nothing was written behind a tensor made by ``values``."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    assert bool((whole[-GUARD:] == 7).all())


def twins_of(function: Callable[[], Any]) -> Any:
    """What ``function`` gives with the twins."""
    before = loader.mode()
    loader.set_mode("torch")
    try:
        return function()
    finally:
        loader.set_mode(before)


def assert_close(found: Tensor, expected: Tensor, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def compare_step(
    function: Callable[..., None],
    states: int,
    numel: int,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    device: str,
    /,
    *,
    offset: int = 0,
    specials: bool = False,
    **options: Any,
) -> None:
    """One step by kernel and by twin from the same tensors; the cast is that of the kernel's own master."""
    grad_dtype, out_dtype = dtypes
    master = values(numel, torch.float32, device, offset=offset)
    state: list[Tensor | None] = [values(numel, torch.float32, device, offset=offset) for _ in range(states)]
    if states == 2:
        state[1].abs_()  # type: ignore[union-attr]  # a second moment
    grad = values(numel, grad_dtype, device, offset=offset, specials=specials)
    before = grad.clone()
    out = None if out_dtype is None else values(numel, out_dtype, device, offset=offset).fill_(7)
    inputs: list[Tensor | None] = [master, *(state or [None]), grad, out]
    copies = [None if tensor is None else tensor.clone() for tensor in inputs]
    function(*inputs, **options)
    twins_of(lambda: function(*copies, **options))
    for mine, theirs in zip(inputs[:-2], copies[:-2], strict=True):
        if mine is not None and theirs is not None:
            assert_guarded(mine)
            close = torch.isclose(mine, theirs, rtol=2e-6, atol=5e-7, equal_nan=True)
            # Lion's sign may turn where its argument is all but 0: a device rounds a * b + c once
            assert int((~close).sum()) <= numel // 1_000_000
    assert torch.equal(grad.nan_to_num(), before.nan_to_num())
    if out is not None:
        assert_guarded(out)
    if out is not None and options["found_inf"]:
        assert bool((out == 7).all())
    elif out is not None:
        assert torch.equal(out.isnan(), master.isnan())
        assert torch.equal(out.nan_to_num(), master.to(out_dtype).nan_to_num())


def adam(*tensors: Any, step: Any, **options: Any) -> None:
    master, state1, state2, grad, out = tensors
    adam_step(master, state1, state2, grad, out, step=step, args=AdamArgs(**options))


def sgd(*tensors: Any, step: Any, **options: Any) -> None:
    master, state, grad, out = tensors
    sgd_step(master, state, grad, out, step=step, args=SgdArgs(**options))


def lion(*tensors: Any, **options: Any) -> None:
    master, state, grad, out = tensors
    lion_step(master, state, grad, out, args=LionArgs(**options))


def scalars(on_device: bool, device: str, **numbers: float) -> dict[str, Any]:
    return {k: torch.tensor(v, device=device) if on_device else v for k, v in numbers.items()}


ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
LION: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
SGD: list[dict[str, Any]] = [
    {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.5, "nesterov": False, "weight_decay": 0.1},
]


def compare_adam(
    device: str, grad: torch.dtype, out: torch.dtype | None, numel: int, found: float = 0.0, **more: Any
) -> None:
    for on_device, count, decoupled in itertools.product((False, True), (1.0, 1000.0), (False, True)):
        numbers = scalars(on_device, device, step=count, lr=1e-2, multiplier=0.25, found_inf=found)
        options = {**ADAM, **numbers, "decoupled": decoupled, **more}
        compare_step(adam, 2, numel, (grad, out), device, **options)


def compare_sgd(
    device: str, grad: torch.dtype, out: torch.dtype | None, numel: int, found: float = 0.0, **more: Any
) -> None:
    for on_device, count, rule in itertools.product((False, True), (1.0, 2.0), SGD):
        numbers = scalars(on_device, device, step=count, lr=1e-2, multiplier=0.25, found_inf=found)
        options = {**rule, **numbers, **more}
        compare_step(sgd, int(rule["momentum"] > 0), numel, (grad, out), device, **options)


def compare_lion(
    device: str, grad: torch.dtype, out: torch.dtype | None, numel: int, found: float = 0.0, **more: Any
) -> None:
    for on_device in (False, True):
        numbers = scalars(on_device, device, lr=1e-2, multiplier=0.25, found_inf=found)
        compare_step(lion, 1, numel, (grad, out), device, **LION, **numbers, **more)


def compare_norm(device: str, dtype: torch.dtype, numel: int, offset: int = 0) -> None:
    tensor = values(numel, dtype, device, offset=offset)
    found = sum_of_squares(tensor)
    assert found.dtype == torch.float64 and found.dim() == 0
    assert_close(found, tensor.double().square().sum(), rtol=1e-6)
    assert torch.equal(found, sum_of_squares(tensor)), "the same bits every time"
    if dtype != torch.float16:
        for size in (1e-36, 1e-25, 1e-15, 1e15, 1e25, 1e37):
            scaled = tensor.clamp(-4, 4) * size  # their squares do not fit into fp32
            assert_close(sum_of_squares(scaled), scaled.double().square().sum(), rtol=1e-5)
    if numel:
        for special in (math.inf, -math.inf, math.nan):
            broken = tensor.clone()
            broken[random.randrange(numel)] = special
            assert not sum_of_squares(broken).isfinite()


def compare_norms(device: str, numels: Sequence[int]) -> None:
    """Tensors of all types at once, of these sizes, against each of them alone: bit by bit."""
    tensors = [values(n, dtype, device, offset=n % 3) for n in numels for dtype in FLOATS]
    together = sums_of_squares(tensors)
    assert all(torch.equal(found, sum_of_squares(t)) for found, t in zip(together, tensors, strict=True))
    for found, tensor in zip(together, tensors, strict=True):
        assert_close(found, tensor.double().square().sum(), rtol=1e-6)


def compare_prepare(device: str) -> None:
    numbers = (0.0, 1e-20, 4.0, 1e30, math.inf, math.nan, -1.0)
    for number, clip, on_device in itertools.product(numbers, (0.0, 1.0, 1e20), (False, True)):
        divisor = scalars(on_device, device, divisor=8.0)["divisor"]
        total = torch.tensor(number, dtype=torch.float64, device=device)

        def prepare(total: Tensor = total, divisor: Any = divisor, clip: float = clip) -> Any:
            return prepare_step(total, divisor=divisor, clip=clip)

        found, expected = prepare(), twins_of(prepare)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == torch.float32 and mine.dim() == 0
            assert_close(mine, theirs, atol=0)
        assert found[2].item() == float(not math.isfinite(number) or number < 0)


def compare_loss_scale(device: str, seed: int) -> None:
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "scale": 2.0 ** chance.randrange(2, 6),
        "window": chance.choice([1, 2, 5]),
        "min_scale": chance.choice([1.0, 0.3]),
        "hysteresis": chance.choice([1, 2, 3]),
        "consecutive_hysteresis": chance.random() < 0.5,
    }
    mine, theirs = LossScaleState(device, **options), LossScaleState(device, **options)
    for _ in range(60):
        flag = torch.tensor(float(chance.random() < 0.4), device=device)
        update_loss_scale(mine, flag)
        twins_of(lambda flag=flag: update_loss_scale(theirs, flag))  # type: ignore[misc]
        assert torch.equal(mine.values, theirs.values)


# -- here, on the CPU

Kernels = CpuKernels
STEPS = pytest.mark.parametrize("compare", [compare_adam, compare_sgd, compare_lion])


@pytest.mark.rotated
@pytest.mark.sampled(1)
@STEPS
@pytest.mark.parametrize("numel", SIZES)
def test_steps_of_any_size(kernels_on_cpu: Kernels, compare: Any, numel: int) -> None:
    compare("cpu", torch.bfloat16, torch.bfloat16, numel)
    assert bool(kernels_on_cpu.launched) == (numel > 0)


@STEPS
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("grad", FLOATS)
def test_steps_of_all_types(kernels_on_cpu: Kernels, compare: Any, grad: torch.dtype, out: Any) -> None:
    compare("cpu", grad, out, 301)
    compare("cpu", grad, out, 301, offset=3)
    compare("cpu", grad, out, 301, specials=True)
    compare("cpu", grad, out, 301, found=1.0, specials=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [*SIZES, 40_000])
def test_sum_of_squares(kernels_on_cpu: Kernels, dtype: torch.dtype, numel: int) -> None:
    compare_norm("cpu", dtype, numel)
    compare_norm("cpu", dtype, numel, offset=1)
    kernels_on_cpu.backwards = True
    compare_norm("cpu", dtype, numel)


def test_sums_of_squares_of_many(kernels_on_cpu: Kernels) -> None:
    compare_norms("cpu", [*SIZES, 40_000])
    kernels_on_cpu.launched.clear()
    assert sums_of_squares([]) == []
    sums_of_squares([torch.ones(100), torch.ones(7), torch.ones(0)])
    assert kernels_on_cpu.launched == ["square_sums", "totals"], "two launches, whatever their number"


def test_prepare(kernels_on_cpu: Kernels) -> None:
    compare_prepare("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_loss_scale(kernels_on_cpu: Kernels, seed: int) -> None:
    compare_loss_scale("cpu", seed)


def cast_by_a_step(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``source`` in another type, cast by the kernel of SGD: a gradient read, or a master written."""
    plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "step": 1.0}
    common: dict[str, Any] = {**plain, "multiplier": 1.0, "found_inf": None}
    if dtype == torch.float32:
        master = torch.zeros(source.shape)
        sgd(master, None, source, None, lr=-1.0, **common)
        return master
    out = torch.empty_like(source, dtype=dtype)
    sgd(source.clone(), None, torch.zeros_like(source), out, lr=0.0, **common)
    return out


def test_casts_of_every_half(kernels_on_cpu: Kernels) -> None:
    """All bit patterns of both 16-bit types, and the fp32 numbers in the middle between two neighbours."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        halves = bits.view(dtype)
        wide = cast_by_a_step(halves, torch.float32)
        assert torch.equal(wide.nan_to_num(), halves.float().nan_to_num())
        middles = (wide[:-1] + wide[1:]) / 2
        beside = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (math.inf, -math.inf)]
        for numbers in (middles, *beside):
            narrow = cast_by_a_step(numbers, dtype)
            assert torch.equal(narrow.nan_to_num(), numbers.to(dtype).nan_to_num())
            assert torch.equal(narrow.isnan(), numbers.isnan())
        odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
        assert bool(cast_by_a_step(odd, dtype).isnan().all()), "whatever the bits of a NaN"
