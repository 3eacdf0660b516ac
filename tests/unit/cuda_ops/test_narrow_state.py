"""Test the layout of narrow optimizer state: maps, codes, scales, rounding at random."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.needs import needs_package
from zlaunch.cuda_ops import narrow_host
from zlaunch.cuda_ops.narrow_state import (
    BLOCK,
    SMALLEST,
    dequantize_state,
    fresh,
    kind_of,
    make_map,
    narrow_as,
    put,
    quantize_state,
    tables,
    widen,
    widen_all,
)
from zlaunch.cuda_ops.narrow_twins import random_bits, round_stochastic


def numbers(signed: bool) -> list[float]:
    """The map by its definition, written in another way: decades, from 1e-7 to 1, of 1, 2, 4 ... cells."""
    found = {0.0, 1.0}
    for decade in range(7):
        cells = 2**decade if signed else 2 ** (decade + 1)
        for cell in range(cells):
            middle = 0.1 + 0.9 * (cell + 0.5) / cells
            found |= {middle * 10.0 ** (decade - 6)}
            found |= {-middle * 10.0 ** (decade - 6)} if signed else set()
    return sorted(found)


def by_distance(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales by sorting distances in float64."""
    table = np.array(numbers(signed))
    codes, scales = [], []
    for block in np.split(values.double().numpy(), range(BLOCK, len(values), BLOCK)):
        scale = max(block, key=lambda x: (abs(x), x))
        ratio = block / scale if scale else block * 0
        found = np.argsort(np.abs(ratio[:, None] - table[None, :]), axis=1, kind="stable")[:, 0]
        codes += [max(int(code), int(not signed and x > 0)) for code, x in zip(found, ratio, strict=True)]
        scales.append(scale)
    return torch.tensor(codes), torch.tensor(scales)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed: bool) -> None:
    found = make_map(signed)
    assert found.dtype == torch.float32 and len(found) == 256
    torch.testing.assert_close(found.double(), torch.tensor(numbers(signed)).double(), rtol=3e-7, atol=0)
    # as bitsandbytes 0.50.2 has them
    first, last = (-0.9929688, 0.9929687) if signed else (0.0, 0.9964844)
    assert found[0].item() == pytest.approx(first) and found[-2].item() == pytest.approx(last)
    assert found[127 if signed else 0] == 0 and found[-1] == 1


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_codes_are_the_nearest(signed: bool, numel: int) -> None:
    torch.manual_seed(numel)
    values = torch.randn(numel) * 10 ** torch.randn(numel).mul(2)
    values = values if signed else values.square()
    codes, scale = quantize_state(values, signed=signed)
    wanted, scales = by_distance(values, signed)
    assert codes.dtype == torch.uint8 and codes.shape == (numel,) and scale.shape == (-(-numel // BLOCK), 1)
    assert torch.equal(scale.view(-1).double(), scales)
    # in the middle between two numbers fp32 may choose the other one
    assert int((codes.long() != wanted).sum()) <= 1 + numel // 2000
    assert int((codes.long() - wanted).abs().max()) <= 1


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e30, 1e-28])
def test_what_was_read_becomes_the_same_codes(signed: bool, size: float) -> None:
    torch.manual_seed(1)
    values = torch.randn(10_000) * size
    values = values if signed else values.abs()
    codes, scale = quantize_state(values, signed=signed)
    again, same = quantize_state(dequantize_state(codes, scale, signed=signed), signed=signed)
    assert torch.equal(codes, again) and torch.equal(scale, same)
    blocks = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, BLOCK)  # a block for each code
    blocks[:, 1] = 255  # beside the largest
    ones = torch.full((256, 1), -size if signed else size)
    again, same = quantize_state(dequantize_state(blocks.view(-1), ones, signed=signed), signed=signed)
    assert torch.equal(again, blocks.view(-1)) and torch.equal(same, ones)


def test_the_largest_is_exact_and_a_positive_second_moment_stays_positive() -> None:
    values = torch.cat([-torch.rand(255), torch.tensor([-3.7])])
    back = dequantize_state(*quantize_state(values, signed=True), signed=True)
    assert back[-1] == values[-1]
    tiny = torch.tensor([1.0, 1e-12, 0.0])
    back = dequantize_state(*quantize_state(tiny, signed=False), signed=False)
    assert back[0] == 1 and back[1] > 0 and back[2] == 0


def test_blocks_that_are_not_finite_or_all_but_zero() -> None:
    values = torch.ones(4 * BLOCK)
    values[3], values[BLOCK], values[2 * BLOCK :] = math.nan, -math.inf, SMALLEST / 2
    values[3 * BLOCK :] = 5
    back = dequantize_state(*quantize_state(values, signed=True), signed=True)
    assert bool(back[: 2 * BLOCK].isnan().all()) and not back[2 * BLOCK : 3 * BLOCK].any()
    assert bool((back[3 * BLOCK :] == 5).all())
    codes, scale = quantize_state(back, signed=True)
    assert torch.equal(dequantize_state(codes, scale, signed=True).isnan(), back.isnan())


def test_no_two_bounds_begin_alike() -> None:
    for bounds in tables(torch.device("cpu"))[1::2]:
        upper = (bounds[:-1].view(torch.int32).long() & 0xFFFFFFFF) >> 16
        assert len(upper.unique()) == 255
    assert narrow_host._lookup().shape == (2, 1 << 16)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_entries(kind: str) -> None:
    leaf = torch.zeros(300)
    own: dict[str, Any] = {"step": torch.tensor(3.0), **fresh(leaf, "exp_avg", kind)}
    assert kind_of(own, "exp_avg") == kind and not widen(own, "exp_avg").any()
    kept = own["exp_avg"]
    values = torch.randn(300)
    put(own, "exp_avg", values, kind)
    assert own["exp_avg"] is kept, "memory is used again"
    torch.testing.assert_close(widen(own, "exp_avg"), values, rtol=0.1, atol=0.02)
    wide = dict(widen_all(own))
    assert wide.keys() == {"step", "exp_avg"} and wide["exp_avg"].dtype == torch.float32
    narrow_as(own, wide)
    assert wide.keys() == own.keys() and all(torch.equal(wide[key], own[key]) for key in own)


# -- rounding at random


@pytest.mark.rotated
def test_the_mean_is_right_and_what_fits_stays() -> None:
    values = torch.tensor([1.001, -3.3e-5, 7e8, 1.0, -0.0, 2.0**-130])
    total = torch.zeros(6, dtype=torch.float64)
    count = 4000
    for step in range(1, count + 1):
        rounded = round_stochastic(values, random_bits(5, float(step), 10, 6, values.device))
        total += rounded.double()
        assert bool(((rounded.double() - values.double()).abs() <= values.double().abs() * 2**-7).all())
    mean, wanted = total / count, values.double()
    # a gap of 2**-7, a standard error of at most half of it over the root of the count
    assert bool(((mean - wanted).abs() <= wanted.abs() * 2**-7 / 2 / math.sqrt(count) * 4).all())
    assert mean[3] == 1 and mean[5] == 2.0**-130


def test_special_values_survive() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, -math.inf]), patterns])
    for low in (0, 0xFFFF):
        found = round_stochastic(values, torch.full((6,), low))
        assert found[0] == math.inf and found[1] == -math.inf and bool(found[2:].isnan().all())


def test_random_bits_depend_on_the_element_alone() -> None:
    where = torch.device("cpu")
    whole = random_bits(9, 4.0, (1 << 32) - 50, 100, where)
    parts = [random_bits(9, 4.0, (1 << 32) - 50 + at, 20, where) for at in range(0, 100, 20)]
    assert torch.equal(whole, torch.cat(parts))
    cases = itertools.product((0, 1), (1.0, 2.0), (0, 1 << 32))
    assert len({tuple(random_bits(*case, 8, where).tolist()) for case in cases}) == 8
    many = random_bits(1, 1.0, 0, 1 << 16, where)
    for bit in range(32):
        assert abs(int(((many >> bit) & 1).sum()) - (1 << 15)) < 5 * 128
    halves = (many & 0xFFFF).double(), (many >> 16).double()
    assert abs(float(torch.corrcoef(torch.stack(halves))[0, 1])) < 0.02


@needs_package("bitsandbytes")
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(1000,), (16, 32)])
def test_the_state_of_bitsandbytes(signed: bool, shape: tuple[int, ...]) -> None:
    from bitsandbytes import functional

    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    values.view(-1)[256:512] = 0
    values = values if signed else values.square()
    codes, kept = functional.quantize_blockwise(
        values, code=functional.create_dynamic_map(signed), blocksize=BLOCK
    )
    own: dict[str, Any] = {"step": 3, "state1": codes, "qmap1": kept.code, "absmax1": kept.absmax}
    wide = widen_all(own)
    assert set(wide) == {"step", "state1"} and kind_of(own, "state1") == "bitsandbytes"
    assert torch.equal(wide["state1"], functional.dequantize_blockwise(codes, kept))
    found = dict(own, state1=torch.zeros_like(codes), absmax1=torch.zeros_like(kept.absmax))
    put(found, "state1", wide["state1"], "bitsandbytes")
    torch.testing.assert_close(widen(found, "state1"), wide["state1"], rtol=1e-6, atol=0)
    put(found, "state1", values, "bitsandbytes")
    own_error = (widen(found, "state1") - values).norm()
    assert 0 < own_error <= 1.05 * (wide["state1"] - values).norm()
    part: dict[str, Any] = {"state1": wide["state1"].view(-1)[100:400]}
    narrow_as(own, part)
    assert part["state1"].dtype == torch.uint8 and part["absmax1"].shape == (2,)
    largest = wide["state1"].abs().max()
    assert (widen(part, "state1") - wide["state1"].view(-1)[100:400]).abs().max() <= 0.02 * largest


def test_other_blocks_of_bitsandbytes_are_not_read() -> None:
    own = {
        "state1": torch.zeros(4096, dtype=torch.uint8),
        "qmap1": torch.zeros(256),
        "absmax1": torch.zeros(2),
    }
    assert kind_of(own, "state1") == "fp32" and widen_all(own) is own
