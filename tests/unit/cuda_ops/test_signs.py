"""Test compression to signs: what is packed, what comes back, and equal bits of all implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zlaunch.cuda_ops import host, loader, signs_host
from zlaunch.cuda_ops.signs import BLOCK, compress, expand, expand_sum, frozen_adam, packed_bytes

from .test_kernels_shim import CpuKernels, kernels_on_cpu, library

__all__ = ["kernels_on_cpu", "library"]
T = TypeVar("T")
SPECIALS = (float("inf"), float("-inf"), float("nan"), 1e-42, 3e38, -0.0)


def twins_of(function: Callable[[], T]) -> T:
    loader.set_mode("torch")
    try:
        return function()
    finally:
        loader.set_mode("auto")


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same bits, whatever those of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def same_packed(a: Tensor, b: Tensor, numel: int) -> bool:
    """Tell whether two packed buffers have the same signs and scales."""
    bits = numel // 8
    scales = (each[bits:].clone().view(torch.float32) for each in (a, b))
    return torch.equal(a[:bits], b[:bits]) and same(*scales)


def packed(values: Tensor) -> Tensor:
    """The packed buffer; ``values`` become what it loses."""
    found = torch.full((packed_bytes(values.numel()),), 170, dtype=torch.uint8, device=values.device)
    compress(values, found)
    return found


def some_values(numel: int, device: str = "cpu", *, offset: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    made = torch.randn(numel + offset, generator=generator)[offset:]
    made *= torch.randint(-20, 20, (numel,), generator=generator).float().exp2()
    for i, special in enumerate(SPECIALS):
        made[512 * i + 17] = special
    made[256:512] = 0
    made[512 * len(SPECIALS) :][:256] *= 1e-40
    return made.to(device)


def compare_signs(device: str, numel: int, *, offset: int = 0) -> None:
    """Each function once by kernel and by twin: bit by bit."""
    given = [some_values(numel, device, offset=offset) * k for k in (1, 2, 3)]
    rows = []
    for values in given:
        mine, theirs = values.clone(), values.clone()
        found, wanted = packed(mine), twins_of(lambda t=theirs: packed(t))  # type: ignore[misc]
        assert same_packed(found, wanted, numel)
        assert same(mine, theirs)
        rows.append(found)
    for count in (1, 3):
        many = torch.stack(rows[:count])
        out, wanted = (torch.full((numel,), 5.0, device=device) for _ in "12")
        expand_sum(many, out, factor=0.3)
        twins_of(lambda m=many, w=wanted: expand_sum(m, w, factor=0.3))  # type: ignore[misc]
        assert same(out, wanted)
    whole, out = torch.cat(given), torch.empty(3 * numel, device=device)
    found = torch.zeros_like(torch.stack(rows))
    compress(whole, found)
    assert all(same_packed(mine, theirs, numel) for mine, theirs in zip(found, rows, strict=True))
    expand(found, out)
    for part, row in zip(out.view(3, -1), rows, strict=True):
        expand(row, wanted)
        assert same(part, wanted)


def test_kernels_give_the_bits_of_their_twins(kernels_on_cpu: CpuKernels) -> None:
    compare_signs("cpu", 20 * BLOCK)
    compare_signs("cpu", 16 * BLOCK, offset=3)
    kernels_on_cpu.backwards = True
    compare_signs("cpu", 16 * BLOCK)
    assert {"compress", "expand"} == set(kernels_on_cpu.launched)


def test_the_cpu_gives_the_bits_of_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signs_host.kernels() is not None, "the tests install numba"
    monkeypatch.setattr(host, "_ALIGN", 1024)
    compare_signs("cpu", 50 * BLOCK)
    compare_signs("cpu", 16 * BLOCK, offset=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.floats(width=32), min_size=8, max_size=8))
def test_any_values_give_the_same_bits(kernels_on_cpu: CpuKernels, numbers: list[float]) -> None:
    values = torch.tensor(numbers).repeat(BLOCK // 8)
    results: list[Any] = []
    for way in ("kernel", "twin"):
        mine, out = values.clone(), torch.empty(BLOCK)
        found = packed(mine) if way == "kernel" else twins_of(lambda m=mine: packed(m))  # type: ignore[misc]
        expand(found.unsqueeze(0), out)
        results.append((found[:32], mine, out))
    assert torch.equal(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1]) and same(results[0][2], results[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_comes_back_and_what_is_lost_are_the_values(dtype: torch.dtype) -> None:
    values = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(1)).to(dtype)
    lost, out = values.clone(), torch.empty_like(values)
    expand(packed(lost).unsqueeze(0), out)
    torch.testing.assert_close(out + lost, values, rtol=1e-6, atol=1e-6)
    assert torch.equal(out >= 0, values >= 0)
    length = values.view(-1, BLOCK).norm(dim=1)
    torch.testing.assert_close(out.view(-1, BLOCK).norm(dim=1), length, rtol=1e-6, atol=0.0)


def test_errors_do_not_add_up() -> None:
    """With the error taken along, the mean of what is sent tends to the values."""
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(2))
    error, out, total = torch.zeros(BLOCK), torch.empty(BLOCK), torch.zeros(BLOCK)
    for _ in range(400):
        error += values
        expand(packed(error).unsqueeze(0), out)
        total += out
    assert float((total / 400 - values).abs().max()) < 0.1


def test_a_block_that_is_not_finite_comes_back_as_nan_and_stays() -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = torch.inf
    kept, out = values.clone(), torch.empty(2 * BLOCK)
    expand(packed(kept).unsqueeze(0), out)
    assert torch.equal(kept[:BLOCK], values[:BLOCK])
    assert bool(out[:BLOCK].isnan().all()) and bool((out[BLOCK:] == 1).all())


def test_where_bits_and_scales_are() -> None:
    values = torch.full((BLOCK,), -2.0)
    values[1] = values[10] = 2.0
    found = packed(values)
    assert found[:3].tolist() == [2, 4, 0] and packed_bytes(BLOCK) == 36
    assert found[32:].clone().view(torch.float32).tolist() == [2.0] and not values.any()


def test_rows_for_many_ranks_are_one_launch(kernels_on_cpu: CpuKernels) -> None:
    values = some_values(64 * BLOCK)
    rows = torch.empty(64, packed_bytes(BLOCK), dtype=torch.uint8)
    compress(values, rows, addend=torch.ones_like(values))
    expand(rows, values, into=torch.ones_like(values))
    expand_sum(rows, values[:BLOCK])
    assert kernels_on_cpu.launched == ["compress", "expand", "expand"]


@pytest.mark.parametrize("mode", ["auto", "torch"])
def test_sums_on_the_way_are_those_of_torch(mode: str) -> None:
    values, other, kept = (some_values(300 * BLOCK) * k for k in (1, 2, 3))
    whole, before = torch.add(values, other, alpha=0.25), kept.clone()
    wanted = packed(whole)
    found, out = torch.zeros_like(wanted), torch.empty_like(values)
    loader.set_mode(mode)
    try:
        compress(values, found, addend=other, alpha=0.25)
        expand(found.unsqueeze(0), out, into=kept, alpha=0.5)
    finally:
        loader.set_mode("auto")
    assert torch.equal(found[: out.numel() // 8], wanted[: out.numel() // 8]) and same(values, whole)
    assert same(kept, torch.add(before, out, alpha=0.5)) and bool(out.any())


def test_a_step_with_a_frozen_variance_is_the_formula() -> None:
    master, momentum, squares = (
        torch.randn(70_000, generator=torch.Generator().manual_seed(k)) for k in (1, 2, 3)
    )
    variance = squares.square().mul_(squares > 0)
    moment = torch.full_like(master, 7.0)
    wanted_moment = momentum * (variance > 0)
    change = wanted_moment / (variance.sqrt() + 1e-8) + 0.1 * master
    wanted = master - 0.01 * change
    loader.set_mode("torch")
    try:
        assert not frozen_adam(master, moment, variance, momentum, lr=0.01, weight_decay=0.1, eps=1e-8)
    finally:
        loader.set_mode("auto")
    assert bool((moment == 7).all()), "nothing has happened"
    assert frozen_adam(master, moment, variance, momentum, lr=0.01, weight_decay=0.1, eps=1e-8)
    assert torch.equal(moment, wanted_moment)
    torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "size", "words"),
    [
        (torch.zeros(100), 36, "multiple of 256"),
        (torch.zeros(256), 35, "packed has 35 bytes, expected 36"),
        (torch.zeros(256, dtype=torch.bfloat16), 36, "values is torch.bfloat16"),
        (torch.zeros(512), (3, 36), "values has 512 elements: expected a multiple of 3 rows"),
        (torch.zeros(512), (2, 72), "packed has 72 bytes, expected 36 in each of 2 rows for 512"),
        (torch.zeros(512), (0, 36), "with at least one row"),
    ],
)
def test_wrong_arguments_are_refused(values: Tensor, size: int | tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compress(values, torch.zeros(size, dtype=torch.uint8))
