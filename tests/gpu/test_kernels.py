"""Test the kernels on the device against their twins; the current stream; no waiting for the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.cuda_ops.test_kernels_math import (
    FLOATS,
    OUTS,
    SIZES,
    adam,
    compare_adam,
    compare_lion,
    compare_loss_scale,
    compare_norm,
    compare_norms,
    compare_prepare,
    compare_sgd,
    lion,
    sgd,
)
from tests.unit.cuda_ops.test_narrow_step import CASES, RULES, compare_bits, compare_narrow
from tests.unit.cuda_ops.test_quantize import BITS, BLOCKS, buffer, compare_quantize
from tests.unit.cuda_ops.test_signs import compare_signs
from zlaunch.cuda_ops import loader
from zlaunch.cuda_ops.loss_scale import LossScaleState, update_loss_scale
from zlaunch.cuda_ops.norm import prepare_step, sum_of_squares, sums_of_squares
from zlaunch.cuda_ops.quantize import dequantize_sum, quantize, quantize_with_error

pytestmark = pytest.mark.gpu
LARGE = 5_000_011  # several strides of the largest grid, and a tail


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    pytest.importorskip("cupy")
    loader.set_mode("cupy")
    yield
    loader.set_mode("auto")


STEPS = pytest.mark.parametrize("compare", [compare_adam, compare_sgd, compare_lion])


@STEPS
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("grad", FLOATS)
def test_steps(compare: Any, grad: torch.dtype, out: Any) -> None:
    for numel in SIZES:
        compare("cuda", grad, out, numel)
    compare("cuda", grad, out, 301, offset=3)
    compare("cuda", grad, out, 301, specials=True)
    compare("cuda", grad, out, 301, found=1.0, specials=True)
    compare("cuda", grad, out, LARGE)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_of_squares(dtype: torch.dtype) -> None:
    for numel, offset in itertools.product((*SIZES, LARGE), (0, 1)):
        compare_norm("cuda", dtype, numel, offset)


def test_sums_of_squares_of_many() -> None:
    compare_norms("cuda", [*SIZES, LARGE])


def test_prepare() -> None:
    compare_prepare("cuda")


@pytest.mark.parametrize("seed", range(4))
def test_loss_scale(seed: int) -> None:
    compare_loss_scale("cuda", seed)


@BITS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_quantize(dtype: torch.dtype, bits: int, block: int) -> None:
    compare_quantize("cuda", dtype, bits, block, 7000)
    compare_quantize("cuda", dtype, bits, block, 2048, offset=3)
    compare_quantize("cuda", dtype, bits, block, LARGE)


def test_signs() -> None:
    compare_signs("cuda", 20 * 256)
    compare_signs("cuda", 16 * 256, offset=3)
    compare_signs("cuda", 256 * 20_000)


def test_quantize_float64_by_torch() -> None:
    given = torch.randn(512, dtype=torch.float64, device="cuda")
    found, out = buffer(512, 8, device="cuda"), torch.empty_like(given)
    quantize(given, found, bits=8)
    dequantize_sum(found.unsqueeze(0), out, bits=8)
    assert float((out - given).abs().max()) < 0.02


def everything(numel: int = 1024) -> list[torch.Tensor]:
    """Each public function once, all scalars on the device; nothing in it may wait."""
    master, m, v = (torch.ones(numel, device="cuda") for _ in range(3))
    grad, out = torch.ones_like(master, dtype=torch.bfloat16), torch.zeros_like(master, dtype=torch.bfloat16)
    lr, step, four = (torch.full((), x, device="cuda") for x in (0.1, 2.0, 4.0))
    total = sum_of_squares(grad)
    torch.stack(sums_of_squares([grad, master]))
    norm, multiplier, found_inf = prepare_step(total, divisor=four, clip=1.0)
    common: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "multiplier": multiplier, "found_inf": found_inf}
    betas = {"beta1": 0.9, "beta2": 0.99}
    adam(master, m, v, grad, out, step=step, eps=1e-8, decoupled=True, **betas, **common)
    rule = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
    sgd(master, m, grad, out, step=step, **rule, **common)
    lion(master, m, grad, out, **betas, **common)
    codes, error, back = buffer(numel, 4, device="cuda"), torch.zeros_like(grad), torch.zeros_like(grad)
    quantize_with_error(grad, error, codes, bits=4, beta=0.8)
    quantize(grad, codes, bits=4)
    dequantize_sum(codes.unsqueeze(0), back, bits=4)
    return [total, norm, multiplier, master, m, v, out, codes, error, back]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("master", "kind"), CASES)
def test_narrow_steps(rule: str, master: torch.dtype, kind: str) -> None:
    for numel, offset in ((1, 0), (300, 3), (70_001, 0), (LARGE, 0)):
        compare_narrow(rule, master, kind, torch.bfloat16, numel, "cuda", offset)
        compare_bits(master, kind, numel, "cuda", offset)


@pytest.mark.parametrize("mode", ["cupy", "torch"])
def test_nothing_waits_for_the_device(mode: str) -> None:
    loader.set_mode(mode)
    state = LossScaleState("cuda", scale=4.0)
    found_inf = torch.zeros((), device="cuda")
    everything()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
        update_loss_scale(state, found_inf)
        assert state.scale.dim() == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_everything_runs_on_the_current_stream() -> None:
    """Work of ours behind a long kernel on the same stream sees what that leaves, on any stream."""
    wanted = everything()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
        tensor += 1
        found = sum_of_squares(tensor)
        results = everything()
    assert not stream.query(), "the host did not wait"
    stream.synchronize()
    assert found.item() == 1 << 20
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_a_step_can_be_captured_in_a_graph() -> None:
    everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, everything(), strict=True))
