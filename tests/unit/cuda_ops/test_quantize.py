"""Test block quantisation: what is packed, what comes back, and that all implementations give the same bits.

``compare_quantize`` runs on any device; ``tests/gpu`` uses it too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zlaunch.cuda_ops import host, loader, quantize_host
from zlaunch.cuda_ops.quantize import (
    BLOCK,
    WIDE,
    dequantize,
    dequantize_sum,
    packed_bytes,
    quantize,
    quantize_with_error,
)

from .test_kernels_math import FLOATS, GUARD, assert_guarded, twins_of, values
from .test_kernels_shim import CpuKernels, kernels_on_cpu, library

__all__ = ["kernels_on_cpu", "library"]  # fixtures

BITS = pytest.mark.parametrize("bits", [8, 4])
MOST = {8: 127, 4: 7}
BLOCKS = (32, 96, 256, 1024)
SMALLEST = 2.0**-126
SPECIALS = (math.inf, -math.inf, math.nan, 3.4e38, 1e-40, -1e-45, 2.0**-126, 2.0**-120, 65504.0, -0.0)


@pytest.fixture(params=["torch", "numba", pytest.param("kernels", marks=pytest.mark.needs("g++"))])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The three implementations; small chunks, so that there are several."""
    monkeypatch.setattr(host, "_ALIGN", 1024)
    if request.param == "torch":
        loader.set_mode("torch")
    elif request.param == "kernels":
        request.getfixturevalue("kernels_on_cpu")
    elif quantize_host.kernels() is None:
        pytest.skip("no numba")
    yield request.param
    loader.set_mode("auto")


def buffer(numel: int, bits: int, block: int = BLOCK, device: str = "cpu", *, offset: int = 0) -> Tensor:
    """A buffer to pack into, with a guard behind it that ``assert_guarded`` looks at."""
    size = packed_bytes(numel, bits=bits, block=block)
    return torch.full((offset + size + GUARD,), 7, dtype=torch.uint8, device=device)[offset : offset + size]


def packed(tensor: Tensor, bits: int, block: int = BLOCK) -> Tensor:
    found = buffer(tensor.numel(), bits, block, str(tensor.device))
    quantize(tensor, found, bits=bits, block=block)
    assert_guarded(found)
    return found


def unpacked(found: Tensor, bits: int, like: Tensor, block: int = BLOCK) -> Tensor:
    out = torch.full_like(like, 5)
    dequantize(found, out, bits=bits, block=block)
    return out


def scales_of(found: Tensor, numel: int, bits: int) -> Tensor:
    return found[numel * bits // 8 :].clone().view(torch.float32)


def same(mine: Tensor, theirs: Tensor) -> bool:
    """Tell whether two tensors have the same bits, whatever those of NaN."""
    return torch.equal(mine.nan_to_num(nan=3.25), theirs.nan_to_num(nan=3.25)) and torch.equal(
        mine.isnan(), theirs.isnan()
    )


def special_values(numel: int, dtype: torch.dtype, device: str, offset: int) -> Tensor:
    """Random numbers of which every other 256 are zeros or have an inf, a NaN or a very small number."""
    made = values(numel, dtype, device, offset=offset)
    for i, special in enumerate(SPECIALS):
        made[512 * i + 17 : 512 * i + 18] = torch.tensor([special]).to(dtype)
    made[512 * len(SPECIALS) : 512 * len(SPECIALS) + 256] = 0
    made[512 * len(SPECIALS) + 512 : 512 * len(SPECIALS) + 768] *= 1e-40
    return made


def compare_quantize(
    device: str, dtype: torch.dtype, bits: int, block: int, numel: int, *, offset: int = 0
) -> None:
    """Each function once by kernel and by twin, from the same tensors: bit by bit.

    ``offset``: elements of values behind an aligned address. If there are any, the error and the packed bytes
    begin elsewhere.
    """
    far = 4 * (offset > 0)
    numel = numel // block * block
    given = special_values(numel, dtype, device, offset)
    options: dict[str, Any] = {"bits": bits, "block": block}
    found = packed(given, bits, block)
    wanted = twins_of(lambda: packed(given, bits, block))
    assert torch.equal(found, wanted)
    assert torch.equal(found.cpu(), twins_of(lambda: packed(given.cpu(), bits, block))), "as on the CPU"
    for kind in dict.fromkeys((torch.float32, dtype)):
        error = values(numel, kind, device, offset=far)
        error *= 0.01
        copy = error.clone()
        mine, theirs = (buffer(numel, bits, block, device, offset=far) for _ in range(2))
        for _ in range(2):
            quantize_with_error(given, error, mine, beta=0.8, **options)
            twins_of(lambda c=copy, t=theirs: quantize_with_error(given, c, t, beta=0.8, **options))  # type: ignore[misc]
            assert torch.equal(mine, theirs) and same(error, copy)
        assert_guarded(mine)
        assert_guarded(error)
    for rows, out_dtype in itertools.product((1, 3), FLOATS):
        each = [found, *[packed(given * k, bits, block) for k in range(1, rows)]]
        many = torch.cat([found[:far], *each])[far:].view(rows, -1)
        out = values(numel, out_dtype, device, offset=offset)
        expected = out.clone()
        dequantize_sum(many, out, **options)
        twins_of(lambda m=many, e=expected: dequantize_sum(m, e, **options))  # type: ignore[misc]
        assert same(out, expected)
        assert_guarded(out)
    whole = torch.cat([given, given * 2, given * 3])
    mine = torch.zeros(3, packed_bytes(numel, bits=bits, block=block), dtype=torch.uint8, device=device)
    quantize(whole, mine, **options)
    assert torch.equal(mine, torch.stack([packed(given * k, bits, block) for k in (1, 2, 3)]))
    error = torch.full_like(whole, 0.01)
    quantize_with_error(whole, error, mine, beta=0.8, **options)
    back = torch.empty_like(whole)
    dequantize(mine, back, **options)
    for k, row in enumerate(mine):
        part = slice(k * numel, (k + 1) * numel)
        once, alone = torch.full_like(given, 0.01), torch.zeros_like(row)
        quantize_with_error(whole[part], once, alone, beta=0.8, **options)
        assert torch.equal(row, alone) and same(error[part], once)
        assert same(back[part], unpacked(row, bits, given, block))


# -- here, on the CPU


@pytest.mark.rotated
@pytest.mark.sampled(2)
@BITS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_kernels_give_the_bits_of_their_twins(
    kernels_on_cpu: CpuKernels, dtype: torch.dtype, bits: int, block: int
) -> None:
    compare_quantize("cpu", dtype, bits, block, 7000)
    compare_quantize("cpu", dtype, bits, block, 2048, offset=3)
    kernels_on_cpu.backwards = True
    compare_quantize("cpu", dtype, bits, block, 2048, offset=8)
    assert {"quantize", "dequantize"} == set(kernels_on_cpu.launched)


@BITS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_cpu_gives_the_bits_of_the_twins(
    dtype: torch.dtype, bits: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantize_host.kernels() is None:
        pytest.skip("no numba")
    monkeypatch.setattr(host, "_ALIGN", 1024)
    compare_quantize("cpu", dtype, bits, block, 7000)
    compare_quantize("cpu", dtype, bits, block, 2048, offset=3)


@pytest.mark.rotated
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=64, max_size=64),
    st.sampled_from(FLOATS),
    st.sampled_from([8, 4]),
    st.floats(0, 1, exclude_max=True),
)
def test_any_values_give_the_same_bits(
    kernels_on_cpu: CpuKernels, numbers: list[float], dtype: torch.dtype, bits: int, beta: float
) -> None:
    given = torch.tensor(numbers).to(dtype)
    found = []
    for implementation in ("kernels", "torch"):
        loader.set_mode("torch" if implementation == "torch" else "auto")
        error, out = given.flip(0).nan_to_num(0, 1, -1) / 16, torch.empty_like(given)
        made = buffer(64, bits, 32)
        quantize_with_error(given, error, made, bits=bits, block=32, beta=beta)
        dequantize(made, out, bits=bits, block=32)
        found.append((made, error, out))
    loader.set_mode("auto")
    assert torch.equal(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1]) and same(found[0][2], found[1][2])


def test_bytes_of_a_buffer() -> None:
    assert packed_bytes(1024, bits=8) == 1024 + 16
    assert packed_bytes(1024, bits=4, block=32) == 512 + 128
    assert packed_bytes(0, bits=4) == 0


def test_where_codes_and_scales_are(way: str) -> None:
    given = torch.zeros(64)
    given[:5] = torch.tensor([7.0, -7.0, 2.5, -1.5, 3.4])  # scale 1; ties go to even
    four = packed(given, 4, 32)
    assert four[:3].tolist() == [0x97, 0xE2, 0x03]
    assert not four[3:32].any() and scales_of(four, 64, 4).tolist() == [1.0, 0.0]
    eight = packed(given * (127 / 7), 8, 32)
    assert eight[:2].view(torch.int8).tolist() == [127, -127]
    assert scales_of(packed(torch.full((32,), 254.0), 8, 32), 32, 8).tolist() == [2.0]


@BITS
@pytest.mark.parametrize("dtype", WIDE)
def test_every_code_comes_back(way: str, bits: int, dtype: torch.dtype) -> None:
    """Also the two codes that are never written: the least ones."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numel = 256 * 8 // bits
    found = torch.cat([codes, torch.full((numel // 32,), 0.5).view(torch.uint8)])
    out = unpacked(found, bits, torch.empty(numel, dtype=dtype), 32)
    signed = codes.view(torch.int8).double()
    if bits == 4:
        low, high = codes.int() % 16, codes.int() // 16
        halves = torch.stack([low, high], 1).view(-1).double()
        signed = torch.where(halves > 7, halves - 16, halves)
    assert torch.equal(out.double(), signed / 2)


@BITS
@given(data=st.data())
def test_what_can_be_represented_comes_back_as_it_was(bits: int, data: st.DataObject) -> None:
    most = MOST[bits]
    codes = data.draw(st.lists(st.integers(-most, most), min_size=31, max_size=31))
    sign = data.draw(st.sampled_from([-1, 1]))
    unit = data.draw(st.integers(1, 2**15)) * 2.0 ** data.draw(st.integers(-120, 100))
    given = torch.tensor([most * sign, *codes]).float() * unit
    assert torch.equal(unpacked(packed(given, bits, 32), bits, given, 32), given)


@pytest.mark.sampled(2)
@BITS
@pytest.mark.parametrize("dtype", WIDE)
@given(numbers=st.lists(st.floats(-1, 1, width=32), min_size=64, max_size=64), power=st.integers(-149, 127))
@example(numbers=[1.0] * 64, power=-149)
@example(numbers=[0.9, *[0.0] * 63], power=-140)
def test_no_value_is_off_by_more_than_half_a_scale(
    bits: int, dtype: torch.dtype, numbers: list[float], power: int
) -> None:
    given = (torch.tensor(numbers, dtype=torch.float64) * 2.0**power).to(dtype)
    given = given.nan_to_num(0, 1, -1)  # what leaves fp16
    found = packed(given, bits, 32)
    scales = scales_of(found, 64, bits).double().repeat_interleave(32)
    back = unpacked(found, bits, torch.empty(64), 32).double()
    rounding = MOST[bits] * 2.0**-22 * scales
    assert bool(((back - given.double()).abs() <= scales / 2 + rounding).all())
    largest = given.double().view(2, 32).abs().amax(1).repeat_interleave(32)
    assert bool((scales <= (largest / MOST[bits] * (1 + 2.0**-23)).clamp(min=SMALLEST)).all())
    assert bool((scales > 0).eq(largest > 0).all())


@BITS
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_a_block_with_an_overflow_comes_back_as_none_else(
    way: str, bits: int, dtype: torch.dtype, special: float
) -> None:
    given, error = torch.randn(768).to(dtype), torch.full((768,), 0.125, dtype=dtype)
    given[300] = special
    wanted = (torch.arange(768) // 256 == 1).tolist()
    found = packed(given, bits)
    back = unpacked(found, bits, given)
    assert back.isnan().tolist() == wanted and (~back.isfinite()).tolist() == wanted
    rows = torch.stack([packed(given.nan_to_num(0, 1, -1), bits), found])
    dequantize_sum(rows, back, bits=bits)
    assert back.isnan().tolist() == wanted and (~back.isfinite()).tolist() == wanted
    quantize_with_error(given, error, found, bits=bits, beta=0.5)
    assert bool((error[256:512] == 0.125).all()) and bool((error[:256] != 0.125).any())


@BITS
def test_an_overflow_of_the_sum_with_the_error_is_seen(way: str, bits: int) -> None:
    given, error = torch.full((256,), 3e38), torch.full((256,), 3e38)
    found = buffer(256, bits)
    quantize_with_error(given, error, found, bits=bits, beta=0.5)
    assert bool(unpacked(found, bits, given).isnan().all()) and bool((error == 3e38).all())


@pytest.mark.rotated
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32),
    st.sampled_from([0.0, 0.5, 0.8]),
    st.sampled_from([8, 4]),
    st.booleans(),
)
@settings(deadline=None)
def test_with_feedback_the_sum_of_many_steps_is_right(
    numbers: list[float], beta: float, bits: int, fixed: bool
) -> None:
    """Check what has not been sent after any number of steps: error / (1 - beta), at most some scales."""
    torch.manual_seed(0)
    steps = 50
    start = torch.tensor(numbers)
    error, made, out = torch.zeros(32), buffer(32, bits, 32), torch.empty(32)
    wanted, sent = torch.zeros(32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    for _ in range(steps):
        given = start if fixed else start * torch.randn(32)
        quantize_with_error(given, error, made, bits=bits, block=32, beta=beta)
        dequantize(made, out, bits=bits, block=32)
        wanted += given
        sent += out
    missing = error.double() / (1 - beta)
    assert bool((wanted - sent - missing).abs().max() <= steps * 1e-5)
    if fixed:
        scale = scales_of(made, 32, bits).max()
        assert bool(missing.abs().max() <= scale * 1.01 / (1 - beta))


def test_without_feedback_small_values_are_never_sent() -> None:
    given, made, out = torch.full((256,), 0.05), buffer(256, 4), torch.empty(256)
    given[0] = 1.0
    error = torch.zeros(256)
    plain, fed = torch.zeros(256), torch.zeros(256)
    for _ in range(100):
        quantize(given, made, bits=4)
        plain += unpacked(made, 4, out)
        quantize_with_error(given, error, made, bits=4, beta=0.8)
        fed += unpacked(made, 4, out)
    assert bool((plain[1:] == 0).all())
    assert torch.allclose(fed[1:], torch.full((255,), 5.0), atol=0.5)


@BITS
def test_the_error_is_the_moving_average_of_what_was_lost(way: str, bits: int) -> None:
    given, error = torch.randn(512), torch.randn(512) / 100
    old, made = error.clone(), buffer(512, bits)
    quantize_with_error(given, error, made, bits=bits, beta=0.75)
    lost = given + old - unpacked(made, bits, given)
    torch.testing.assert_close(error, 0.75 * old + 0.25 * lost)
    quantize_with_error(given, error := torch.zeros(512), other := buffer(512, bits), bits=bits, beta=0.75)
    assert torch.equal(other, packed(given, bits)), "without an error it is quantize"


@BITS
def test_rows_are_added_in_their_order(way: str, bits: int) -> None:
    rows = torch.stack([packed(torch.randn(512) * 10.0**k, bits) for k in (3, -3, 0, 3, -1)])
    total = torch.zeros(512)
    for row in rows:
        total += unpacked(row, bits, total)
    for dtype in FLOATS:
        out = torch.empty(512, dtype=dtype)
        dequantize_sum(rows, out, bits=bits)
        assert torch.equal(out, total.to(dtype)), "rounded once"
    exact, wide = torch.empty(512, dtype=torch.float64), torch.empty(512, dtype=torch.float64)
    dequantize_sum(rows, exact, bits=bits)
    assert torch.equal(exact, sum((unpacked(row, bits, wide) for row in rows), torch.zeros_like(wide)))


def test_rows_for_many_ranks_are_one_launch(kernels_on_cpu: CpuKernels) -> None:
    given, rows = torch.randn(64 * BLOCK), torch.empty(64, packed_bytes(BLOCK, bits=4), dtype=torch.uint8)
    quantize(given, rows, bits=4)
    quantize_with_error(given, torch.zeros_like(given), rows, bits=4, beta=0.5)
    dequantize(rows, given, bits=4)
    dequantize_sum(rows, given[:BLOCK], bits=4)
    assert kernels_on_cpu.launched == ["quantize", "quantize", "dequantize", "dequantize"]


def test_float64_is_for_torch(kernels_on_cpu: CpuKernels) -> None:
    given = torch.randn(512, dtype=torch.float64) * 1e-3
    given[300] = 1e300  # whose scale leaves fp32
    found = packed(given, 8)
    back = unpacked(found, 8, given)
    assert kernels_on_cpu.launched == []
    assert bool(back[256:].isnan().all()) and float((back - given)[:256].abs().max()) < 2e-5
    error = torch.zeros(512, dtype=torch.float64)
    quantize_with_error(given, error, found, bits=8, beta=0.0)
    assert torch.equal(error[:256], (given - back)[:256])


def test_nothing_is_nothing(way: str) -> None:
    none = torch.empty(0)
    assert packed(none, 8).numel() == 0 and unpacked(packed(none, 4), 4, none).numel() == 0
    quantize_with_error(none, none.clone(), buffer(0, 4), bits=4, beta=0.0)


def test_a_machine_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(512)
    wanted = packed(given, 4)
    monkeypatch.setattr(quantize_host, "kernels", lambda: None)
    assert torch.equal(packed(given, 4), wanted)


F, B, P = torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16), buffer(256, 8)
E: dict[str, Any] = {"bits": 8, "beta": 0.5}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packed_bytes(256, bits=3), "bits is 3, expected 8 or 4"),
        (lambda: packed_bytes(256, bits=8, block=48), "block is 48, expected a positive multiple of 32"),
        (lambda: packed_bytes(256, bits=8, block=0), "block is 0"),
        (lambda: packed_bytes(300, bits=8), "numel is 300, expected a multiple of block, 256"),
        (lambda: quantize(F.int(), P, bits=8), "values is torch.int32"),
        (lambda: quantize(F.view(2, 128), P, bits=8), r"values has shape \[2, 128\]"),
        (lambda: quantize(torch.zeros(512)[::2], P, bits=8), r"values .* stride \[2\]"),
        (lambda: quantize(F[:100], P, bits=8), "numel is 100"),
        (lambda: quantize(F, P.view(torch.int8), bits=8), "packed is torch.int8"),
        (lambda: quantize(F, P[:-4], bits=8), "packed has 256 bytes, expected 260 for 256"),
        (lambda: quantize(F, P.to("meta"), bits=8), "packed is on meta"),
        (lambda: quantize(F, torch.zeros(300, dtype=torch.uint8)[1:261], bits=8), "be aligned to 4 bytes"),
        (lambda: quantize_with_error(F, F[:128], P, **E), "error has 128 elements, expected 256"),
        (lambda: quantize_with_error(F, B, P, **E), "error is torch.bfloat16, expected torch.float32$"),
        (lambda: quantize_with_error(B, B.half(), P, **E), "error is .* torch.float32 or torch.bfloat16"),
        (lambda: quantize_with_error(F, F.to("meta"), P, **E), "error is on meta"),
        (lambda: quantize_with_error(F, F.clone(), P, bits=8, beta=1.0), "beta is 1.0"),
        (lambda: dequantize(P, F.long(), bits=8), "out is torch.int64"),
        (lambda: dequantize(P, F, bits=4), "packed has 260 bytes, expected 132"),
        (lambda: dequantize_sum(P, F, bits=8), r"packed_rows has shape \[260\]"),
        (lambda: dequantize_sum(P.view(1, 260)[:0], F, bits=8), r"packed_rows has shape \[0, 260\]"),
        (lambda: dequantize_sum(P.view(2, 130), F, bits=8), "packed_rows has 130 bytes"),
        (lambda: dequantize_sum(torch.stack([P, P], 1).T, F, bits=8), r"packed_rows .* stride \[1, 2\]"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
