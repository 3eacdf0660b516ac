"""Test twins and the CPU path against torch.optim, a plain Lion and LossScaler; modes; wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.limits import LIMIT_S
from zlaunch.cuda_ops import host, loader
from zlaunch.cuda_ops.loss_scale import LossScaleState, update_loss_scale
from zlaunch.cuda_ops.norm import prepare_step, sum_of_squares
from zlaunch.runtime.errors import LossScaleFloorError
from zlaunch.runtime.precision import LossScaler

from .test_kernels_math import adam, lion, sgd

WAYS = ("torch", "chunks", "numba")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The three implementations of a step on the CPU; small chunks, so that there are several."""
    if request.param == "torch":
        loader.set_mode("torch")
    elif request.param == "chunks":
        monkeypatch.setattr(host, "kernel", lambda name: None)
    else:
        pytest.importorskip("numba")
    monkeypatch.setattr(host, "_ALIGN", 1024)
    monkeypatch.setattr(host, "_CHUNK", 1024)
    yield request.param
    loader.set_mode("auto")


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    yield
    loader.set_mode("auto")


class Run:
    """Ten steps of a torch optimizer; ours gets its gradients times 4 and a multiplier of 1/4."""

    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer], numel: int = 3000) -> None:
        torch.manual_seed(0)
        self.start = torch.randn(numel)
        parameter = self.start.clone().requires_grad_()
        optimizer = make([parameter])
        self.gradients = [torch.randn(numel) for _ in range(10)]
        self.wanted = []
        for gradient in self.gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
            self.wanted.append(parameter.detach().clone())

    def check(self, step: Callable[..., None], states: int, grad_dtype: torch.dtype, **options: Any) -> None:
        master, state = self.start.clone(), [torch.full_like(self.start, 0.0) for _ in range(states)]
        out = torch.empty_like(master, dtype=torch.bfloat16)
        for count, (gradient, wanted) in enumerate(zip(self.gradients, self.wanted, strict=True), 1):
            grad = (gradient * 4).to(grad_dtype)
            numbers: dict[str, Any] = {"step": count, "lr": 1e-2} if step is not lion else {"lr": 1e-2}
            step(master, *state, grad, out, **numbers, multiplier=0.25, found_inf=0.0, **options)
            if grad_dtype == torch.float32:
                torch.testing.assert_close(master, wanted, rtol=1e-5, atol=1e-6)
            else:
                assert float((master - wanted).norm() / (wanted - self.start).norm()) < 0.05
            assert torch.equal(out, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_that_of_torch(way: str, decoupled: bool, dtype: torch.dtype) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    run = Run(lambda p: kind(p, 1e-2, (0.8, 0.95), weight_decay=0.1, foreach=True))
    numbers = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    run.check(adam, 2, dtype, **numbers, decoupled=decoupled)


def test_eps_is_added_to_the_corrected_root(way: str) -> None:
    """An eps of the gradients' size: beside a small one its place in the formula would not be seen."""
    run = Run(lambda p: torch.optim.AdamW(p, 1e-2, (0.8, 0.95), eps=0.5, weight_decay=0.1, foreach=True))
    numbers = {"beta1": 0.8, "beta2": 0.95, "eps": 0.5, "weight_decay": 0.1}
    run.check(adam, 2, torch.float32, **numbers, decoupled=True)


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "decay"),
    [(0.0, 0.0, False, 0.0), (0.9, 0.0, False, 0.1), (0.9, 0.4, False, 0.1), (0.9, 0.0, True, 0.1)],
)
def test_sgd_is_that_of_torch(
    way: str, momentum: float, dampening: float, nesterov: bool, decay: float
) -> None:
    options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    options["weight_decay"] = decay
    run = Run(lambda p: torch.optim.SGD(p, 1e-2, **options))

    def step(master: Tensor, *rest: Any, **more: Any) -> None:
        sgd(master, *(rest if momentum else (None, *rest)), **more)

    run.check(step, int(momentum > 0), torch.float32, **options)


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, line by line."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
        self.m = torch.zeros_like(parameters[0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (p,) = self.param_groups[0]["params"]
        c = 0.9 * self.m + (1 - 0.9) * p.grad
        p -= 1e-2 * (torch.sign(c) + 0.1 * p)
        self.m = 0.99 * self.m + (1 - 0.99) * p.grad


def test_lion_is_that_of_the_paper(way: str) -> None:
    run = Run(PlainLion)
    run.check(lion, 1, torch.float32, beta1=0.9, beta2=0.99, weight_decay=0.1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_fp32_without_out_is_torch_to_the_bit(decoupled: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameter = torch.randn(10_000, requires_grad=True)
    master = parameter.detach().clone()
    m, v = torch.zeros(10_000), torch.zeros(10_000)
    optimizer = kind([parameter], 1e-2, weight_decay=0.1, fused=True)
    optimizer._step_supports_amp_scaling = True
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for count in range(1, 6):
        grad = torch.randn(10_000)
        parameter.grad = grad.clone()
        optimizer.step()
        numbers: dict[str, Any] = {
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        numbers |= {"decoupled": decoupled, "multiplier": 0.25, "found_inf": None, "step": count, "lr": 1e-2}
        adam(master, m, v, grad, None, **numbers)
        assert torch.equal(master, parameter)


def adam_options(**more: Any) -> dict[str, Any]:
    options = {"step": 3, "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    return {**options, "decoupled": True, "multiplier": 0.5, "found_inf": None, **more}


def adam_tensors(numel: int, grad: torch.dtype = torch.bfloat16, out: Any = torch.bfloat16) -> list[Any]:
    torch.manual_seed(numel)
    state = [torch.randn(numel), torch.randn(numel), torch.rand(numel)]
    return [*state, torch.randn(numel).to(grad), None if out is None else torch.zeros(numel, dtype=out)]


@pytest.mark.parametrize("found", [1.0, 2.0, torch.tensor(1.0)])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, None)])
def test_found_inf_leaves_everything_alone(way: str, dtypes: Any, found: Any) -> None:
    tensors = adam_tensors(3000, *dtypes)
    tensors[3][5] = torch.inf
    before: list[Any] = [tensor if tensor is None else tensor.clone() for tensor in tensors]
    adam(*tensors, **adam_options(found_inf=found))
    for mine, old in zip(tensors, before, strict=True):
        assert mine is None or torch.equal(mine, old)


@pytest.mark.parametrize("step", [sgd, lion])
def test_found_inf_leaves_momentum_alone(way: str, step: Callable[..., None]) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(3000),
        torch.randn(3000),
        torch.randn(3000),
        torch.zeros(3000, dtype=torch.bfloat16),
    ]
    tensors[2][5] = torch.inf
    before = [tensor.clone() for tensor in tensors]
    numbers: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "multiplier": 0.5, "found_inf": 1.0}
    own: dict[str, Any] = {"step": 3, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    step(*tensors, **numbers, **(own if step is sgd else {"beta1": 0.9, "beta2": 0.99}))
    assert all(torch.equal(mine, old) for mine, old in zip(tensors, before, strict=True))


@given(st.integers(0, 9000), st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16]))
def test_the_number_of_threads_changes_no_bit(numel: int, threads: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    kernel = host.kernel("adam")
    assert kernel is not None
    one, several = adam_tensors(numel, dtype, dtype), adam_tensors(numel, dtype, dtype)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(torch, "get_num_threads", lambda: 1)
        adam(*one, **adam_options())
        context.setattr(torch, "get_num_threads", lambda: threads)
        context.setattr(torch, "set_num_threads", lambda number: None)
        context.setattr(host, "_ALIGN", 1024)
        adam(*several, **adam_options())
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


@pytest.mark.rotated
def test_numbas_casts_of_every_half() -> None:
    pytest.importorskip("numba")
    from zlaunch.cuda_ops import host_kernels

    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    wide = np.empty(1 << 16, np.float32)
    zero, count, none = np.uint64(0), np.uint64(1 << 16), np.empty(0, np.float32)
    raw = halves.view(torch.uint16).numpy()
    host_kernels.widen(raw, none, host_kernels.FLOAT16, zero, wide, count)
    assert torch.equal(torch.from_numpy(wide).nan_to_num(), halves.float().nan_to_num())
    middles = (halves[1:].float() + halves[:-1].float()) / 2
    up, down = (torch.nextafter(middles, torch.full_like(middles, to)) for to in (torch.inf, -torch.inf))
    numbers = torch.cat([middles, up, down, torch.tensor([torch.inf, -torch.inf, 65519.99, 65520.0, 3e38])])
    for dtype, kind in ((torch.bfloat16, host_kernels.BFLOAT16), (torch.float16, host_kernels.FLOAT16)):
        out, scratch = torch.empty_like(numbers, dtype=dtype), np.empty(numbers.numel(), np.float32)
        bits, half = numbers.view(torch.uint32).numpy(), out.view(torch.uint16).numpy()
        host_kernels.narrow(bits, zero, half, kind, zero, scratch, np.uint64(numbers.numel()))
        assert torch.equal(out.nan_to_num(), numbers.to(dtype).nan_to_num())
        assert torch.equal(out.isnan(), numbers.isnan())


def test_the_pool_leaves_the_number_of_threads_alone() -> None:
    host._pool.cache_clear()
    before = torch.get_num_threads()
    pool = host._pool(3)
    try:
        assert list(pool.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
        assert torch.get_num_threads() == 3
        torch.set_num_threads(before)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [before]
    finally:
        torch.set_num_threads(before)
        pool.shutdown()
        host._pool.cache_clear()


@pytest.mark.exhaustive
def test_a_forked_child_makes_a_pool_of_its_own() -> None:
    code = """if True:
        import os, torch
        from tests.unit.cuda_ops.test_kernels_twins import adam_options, adam_tensors
        from zlaunch.cuda_ops import host
        from tests.unit.cuda_ops.test_kernels_math import adam
        torch.set_num_threads(2)
        tensors = adam_tensors(1 << 18)
        adam(*tensors, **adam_options())
        if (child := os.fork()) == 0:
            adam(*tensors, **adam_options())
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout == "7\n", result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_of_squares(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for numel in (0, 1, 7, 200_000):
        tensor = torch.randn(numel).to(dtype)
        wanted = tensor.double().square().sum()
        # fp32 sums of a CPU: their error depends on its vectors and threads.
        torch.testing.assert_close(sum_of_squares(tensor), wanted, rtol=4e-6, atol=0)
        if numel:
            for special in (torch.inf, torch.nan):
                tensor[numel // 2] = special
                assert not sum_of_squares(tensor).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares_that_fp32_does_not_hold(dtype: torch.dtype) -> None:
    for numel in (1, 5000):
        for size in (1e-36, 1e-25, 1e-19, 1e-12, 1e12, 1e19, 1e25, 1.5e38):
            tensor = (torch.rand(numel) + 0.5).mul_(size).to(dtype)
            wanted = tensor.double().square().sum()
            torch.testing.assert_close(sum_of_squares(tensor), wanted, rtol=4e-6, atol=0)
    mixed = torch.randn(20_000).to(dtype)  # rows of all sizes, some of them zeros
    mixed[:4000], mixed[4100:9000], mixed[13_000:] = 0, 0, mixed[13_000:] * 1e-30
    torch.testing.assert_close(sum_of_squares(mixed), mixed.double().square().sum(), rtol=4e-6, atol=0)
    mixed[5] = 3e38
    torch.testing.assert_close(sum_of_squares(mixed), mixed.double().square().sum(), rtol=4e-6, atol=0)
    assert sum_of_squares(torch.zeros(5000, dtype=dtype)).item() == 0


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_prepare_step_is_clip_grad_norm(clip: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    gradient = torch.randn(100)
    parameter.grad = gradient / 8
    wanted = torch.nn.utils.clip_grad_norm_([parameter], clip) if clip else parameter.grad.norm()
    norm, multiplier, found_inf = prepare_step(sum_of_squares(gradient), divisor=8.0, clip=clip)
    torch.testing.assert_close(norm, wanted)
    torch.testing.assert_close(gradient * multiplier, parameter.grad)
    assert found_inf.item() == 0
    assert prepare_step(torch.tensor(torch.nan), divisor=8.0, clip=clip)[2].item() == 1


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.3]),
    st.integers(1, 3),
    st.booleans(),
)
@example([True] * 5, 1, 1.0, 1, False)  # down to the smallest scale, and an overflow there
def test_loss_scale_is_that_of_the_host(
    overflows: list[bool], window: int, min_scale: float, hysteresis: int, consecutive: bool
) -> None:
    options: dict[str, Any] = {"scale": 8.0, "window": window, "min_scale": min_scale}
    options |= {"hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
    theirs, mine = LossScaler(dynamic=True, **options), LossScaleState("cpu", **options)
    for overflow in overflows:
        floor = False
        try:
            theirs.note(overflow)
        except LossScaleFloorError:
            floor = True
        update_loss_scale(mine, float(overflow))
        assert mine.state_dict() == theirs.state_dict()
        assert mine.scale.item() == torch.tensor(theirs.scale).item()
        if floor:
            assert mine.at_floor.item() == 1
            break
        assert mine.at_floor.item() == 0
    again = LossScaleState("cpu", **options)
    again.load_state_dict(mine.state_dict())
    assert again.state_dict() == mine.state_dict()


# -- modes and mistakes


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernel mode 'cuppy': did you mean 'cupy'\?"):
        loader.set_mode("cuppy")
    with pytest.raises(ValueError, match="expected one of auto, cupy, torch"):
        loader.set_mode("xyz")
    device_tensor: Any = type("OnDevice", (), {"is_cuda": True, "get_device": lambda self: 0})()
    monkeypatch.setattr(loader, "trial", lambda index: "")
    monkeypatch.setattr(loader, "obstacle", lambda: "it rains: pip install 'zlaunch[cuda12]'")
    loader.set_mode("auto")
    with pytest.warns(UserWarning, match="it rains"):
        assert not loader.use_kernels(device_tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert not loader.use_kernels(device_tensor)
        assert not loader.use_kernels(torch.zeros(1))
    loader.set_mode("cupy")
    assert not loader.use_kernels(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"it rains: pip install 'zlaunch\[cuda12\]'"):
        loader.use_kernels(device_tensor)
    loader.set_mode("torch")
    assert not loader.use_kernels(device_tensor)
    monkeypatch.setattr(loader, "obstacle", lambda: "")
    loader.set_mode("auto")
    assert loader.use_kernels(device_tensor)
    monkeypatch.setattr(loader, "trial", lambda index: f"cuda:{index} launches nothing")
    with pytest.warns(UserWarning, match="cuda:0 launches nothing"):
        assert not loader.use_kernels(device_tensor)


def test_a_device_on_which_nothing_can_be_launched() -> None:
    assert "a test kernel failed on cuda:0 (" in loader.trial.__wrapped__(0)


@pytest.mark.parametrize(
    ("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13"), (None, "has no CUDA support")]
)
def test_what_stands_in_the_way_of_cupy(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(loader, "cupy", missing)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert extra in loader.obstacle.__wrapped__()


@pytest.mark.rotated
def test_importing_loads_neither_cupy_nor_numba() -> None:
    code = "import sys, zlaunch.cuda_ops.step, zlaunch.cuda_ops.norm, zlaunch.cuda_ops.quantize\n"
    code += "print({'cupy', 'numba'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout == "set()\n", result.stderr


F, B, N = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adam(B, F, F, B, N, **adam_options()), "master is torch.bfloat16"),
        (lambda: adam(F, F[:4], F, B, N, **adam_options()), "exp_avg has 4 elements, expected 8"),
        (lambda: adam(F, F, F.to("meta"), B, N, **adam_options()), "exp_avg_sq is on meta"),
        (lambda: adam(F, F, F, F.double(), N, **adam_options()), "grad is torch.float64"),
        (lambda: adam(F, F, F, F, F, **adam_options()), "out is torch.float32"),
        (lambda: adam(F, F, F, F.view(2, 4), N, **adam_options()), r"grad has shape \[2, 4\]"),
        (lambda: adam(F, F, F, torch.zeros(16)[::2], N, **adam_options()), r"grad .* stride \[2\]"),
        (lambda: adam(F, F, F, F, N, **adam_options(lr=F)), r"lr is torch.float32 of shape \[8\]"),
        (lambda: adam(F, F, F, F, N, **adam_options(step=torch.tensor(1))), "step is torch.int64"),
        (lambda: adam(F, F, F, F, N, **adam_options(beta1=1.0)), "beta1 is 1.0"),
        (lambda: adam(F, F, F, F, N, **adam_options(step=0)), "step is 0"),
        (lambda: sum_of_squares(F.double()), "tensor is torch.float64"),
        (lambda: prepare_step(F, divisor=1.0, clip=0.0), "sum_squares"),
        (lambda: prepare_step(torch.tensor(1.0), divisor=1.0, clip=-1.0), "clip is -1.0"),
        (lambda: LossScaleState("cpu", scale=1.0, window=0), "window is 0"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


SGD = {"step": 1, "lr": 0.1, "dampening": 0.0, "weight_decay": 0.0, "multiplier": 1.0, "found_inf": None}


def test_sgd_wants_a_buffer_exactly_with_momentum() -> None:
    with pytest.raises(ValueError, match="momentum_buffer is missing"):
        sgd(F, None, F, None, momentum=0.9, nesterov=False, **SGD)
    with pytest.raises(ValueError, match="momentum_buffer is given"):
        sgd(F, F, F, None, momentum=0.0, nesterov=False, **SGD)
    with pytest.raises(ValueError, match="nesterov"):
        sgd(F, None, F, None, momentum=0.0, nesterov=True, **SGD)


def test_sgd_forgets_what_a_fresh_buffer_holds(way: str) -> None:
    master, buffer, grad = torch.ones(2000), torch.full((2000,), torch.nan), torch.ones(2000)
    sgd(master, buffer, grad, None, momentum=0.9, nesterov=False, **SGD)
    assert torch.equal(buffer, grad) and torch.allclose(master, torch.tensor(0.9))
