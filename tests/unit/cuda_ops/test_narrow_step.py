"""Test steps with narrow states and masters: CUDA's kernels as C++ on the CPU, numba's and torch's twins.

The ``compare_*`` functions run on any device; ``tests/gpu`` uses them too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zlaunch.cuda_ops import loader, narrow_host
from zlaunch.cuda_ops.arguments import AdamArgs, LionArgs, SgdArgs
from zlaunch.cuda_ops.narrow_state import BLOCK, SCALE, put, widen_all
from zlaunch.cuda_ops.narrow_step import narrow_step
from zlaunch.cuda_ops.narrow_twins import States
from zlaunch.cuda_ops.step import SliceUpdate, needs_kernel
from zlaunch.runtime.optim.lion import Lion
from zlaunch.runtime.optim.update_rule import UpdateRule

from .test_kernels_math import scalars, twins_of
from .test_kernels_shim import CpuKernels, kernels_on_cpu, library

__all__ = ["kernels_on_cpu", "library"]  # fixtures

RULES: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "adam": (AdamArgs, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, ("exp_avg", "exp_avg_sq")),
    "sgd": (SgdArgs, {"momentum": 0.9, "dampening": 0.5, "nesterov": False}, ("momentum_buffer",)),
    "lion": (LionArgs, {"beta1": 0.9, "beta2": 0.99}, ("exp_avg",)),
}
CASES = [(torch.float32, kind) for kind in ("bf16", "int8")]
CASES += [(torch.bfloat16, kind) for kind in ("fp32", "bf16", "int8")]


class Tensors:
    """A step's tensors, and copies of them."""

    def __init__(
        self,
        rule: str,
        master: torch.dtype,
        kind: str,
        grad: torch.dtype,
        numel: int,
        device: str,
        offset: int,
    ) -> None:
        def flat(dtype: torch.dtype) -> Tensor:
            return torch.randn(offset + numel).to(device, dtype)[offset:]

        self.rule = rule
        self.master, self.grad = flat(master), flat(grad)
        self.out = torch.full_like(self.master, 7, dtype=torch.bfloat16) if master == torch.float32 else None
        self.states: list[tuple[Tensor, Tensor | None]] = []
        for name in RULES[rule][2]:
            own: dict[str, Any] = {}
            values = flat(torch.float32) / 10
            put(own, name, values.square() if name == "exp_avg_sq" else values, kind)
            self.states.append((own[name], own.get(name + SCALE)))

    def copy(self) -> Tensors:
        made: Tensors = object.__new__(Tensors)
        made.rule, made.master, made.grad = self.rule, self.master.clone(), self.grad
        made.out = None if self.out is None else self.out.clone()
        made.states = [(kept.clone(), None if s is None else s.clone()) for kept, s in self.states]
        return made

    def step(self, step: Any, place: int = (1 << 32) - 70, **options: Any) -> None:
        kind, fixed, _ = RULES[self.rule]
        fixed = {"weight_decay": 0.1, **fixed, **options}
        args = kind(**fixed, decoupled=True) if self.rule == "adam" else kind(**fixed)
        narrow_step(self.master, self.states, self.grad, self.out, step, args, key=77, place=place)

    def all(self) -> list[Tensor]:
        flat = [tensor for pair in self.states for tensor in pair if tensor is not None]
        return [self.master, *flat, *([] if self.out is None else [self.out])]


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """fp32 to its rounding; codes and bf16 to a neighbour, and nearly all of them equal: fp32 that differs by
    a rounding may be on the other side of a bound. Lion's sign may turn where its argument is all but 0.
    """
    assert found.dtype == wanted.dtype
    numel = found.numel()
    if found.dtype == torch.float32:
        close = torch.isclose(found, wanted, rtol=1e-5, atol=2e-6)
        assert int((~close).sum()) <= (numel > 1000) + numel // 5000
        return
    if found.dtype == torch.uint8:
        apart = (found.long() - wanted.long()).abs()
    else:
        a, b = (t.view(torch.int16).long() for t in (found, wanted))
        apart = torch.where((a < 0) == (b < 0), (a - b).abs(), ((a & 0x7FFF) + (b & 0x7FFF)))
    assert int((apart > 0).sum()) <= 2 + numel // 50
    assert int((apart > 1).sum()) <= (numel > 1000) + numel // 1000


def compare_narrow(
    rule: str, master: torch.dtype, kind: str, grad: torch.dtype, numel: int, device: str, offset: int = 0
) -> None:
    """Steps by kernel and by twin from the same tensors; with found_inf nothing is changed."""
    for on_device, count in itertools.product((False, True), (1.0, 1000.0)):
        mine = Tensors(rule, master, kind, grad, numel, device, offset)
        theirs, before, skipped = mine.copy(), mine.copy(), mine.copy()
        numbers = scalars(on_device, device, step=count, lr=1e-2, multiplier=0.25, found_inf=0.0)
        mine.step(**numbers)
        twins_of(lambda theirs=theirs, numbers=numbers: theirs.step(**numbers))  # type: ignore[misc]
        for found, wanted in zip(mine.all(), theirs.all(), strict=True):
            assert_alike(found, wanted)
        skipped.step(**{**numbers, "found_inf": scalars(on_device, device, found_inf=1.0)["found_inf"]})
        assert all(torch.equal(a, b) for a, b in zip(skipped.all(), before.all(), strict=True))
        assert numel < 100 or not torch.equal(mine.master, before.master)


def compare_bits(master: torch.dtype, kind: str, numel: int, device: str, offset: int = 0) -> None:
    """A step whose arithmetic is exact in fp32, which leaves the gradient in the momentum, and
    an eighth of it in the master: the same bits.
    """
    tensors = Tensors("sgd", master, kind, torch.bfloat16, numel, device, offset)
    tensors.master.zero_()
    theirs = tensors.copy()
    numbers: dict[str, Any] = {"step": 1.0, "lr": 0.125, "multiplier": 1.0, "found_inf": 0.0}
    numbers |= {"weight_decay": 0.0, "dampening": 0.0}
    tensors.step(**numbers)
    twins_of(lambda: theirs.step(**numbers))
    assert all(torch.equal(a, b) for a, b in zip(tensors.all(), theirs.all(), strict=True))


GRADS = pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])


@GRADS
@pytest.mark.parametrize("rule", RULES)
def test_kernels_step_as_the_twins(kernels_on_cpu: CpuKernels, rule: str, grad: torch.dtype) -> None:
    torch.manual_seed(0)
    for master, kind in CASES:
        for numel, offset in ((0, 0), (1, 0), (300, 3), (1100, 0)):
            compare_narrow(rule, master, kind, grad, numel, "cpu", offset)
    assert set(kernels_on_cpu.launched) == {f"narrow_{rule}"}


def test_kernels_give_the_bits_of_the_twins(kernels_on_cpu: CpuKernels) -> None:
    for (master, kind), backwards in itertools.product(CASES, (False, True)):
        kernels_on_cpu.backwards = backwards
        for numel, offset in ((5, 0), (256, 0), (3000, 0), (777, 1)):
            compare_bits(master, kind, numel, "cpu", offset)


@pytest.fixture
def numba() -> Iterator[None]:
    if any(narrow_host.kernel(rule) is None for rule in RULES):
        pytest.skip("no numba")
    yield
    loader.set_mode("auto")


@pytest.mark.sampled(2)
@GRADS
@pytest.mark.parametrize("rule", RULES)
def test_numba_steps_as_the_twins(numba: None, rule: str, grad: torch.dtype) -> None:
    torch.manual_seed(0)
    for (master, kind), numel in itertools.product(CASES, (0, 1, 300, 70_001)):
        compare_narrow(rule, master, kind, grad, numel, "cpu")


def test_numba_gives_the_bits_of_the_twins(numba: None) -> None:
    for (master, kind), numel in itertools.product(CASES, (1, 5, 256, 1025, 200_003)):
        compare_bits(master, kind, numel, "cpu")


@pytest.mark.parametrize("mode", ["auto", "torch"])
@pytest.mark.parametrize(("master", "kind"), CASES)
def test_parts_give_the_bits_of_the_whole(mode: str, master: torch.dtype, kind: str) -> None:
    """Random bits and blocks depend neither on where a piece is cut, nor on threads."""
    torch.manual_seed(0)
    numel = 140_000 if mode == "auto" else 9_000
    whole = Tensors("adam", master, kind, torch.bfloat16, numel, "cpu", 0)
    parts = whole.copy()
    numbers: dict[str, Any] = {"step": 3.0, "lr": 1e-2, "multiplier": 1.0}
    loader.set_mode(mode)
    try:
        whole.step(**numbers, place=100)
        for start in range(0, numel, 5 * BLOCK):
            stop = start + 5 * BLOCK
            part = parts.copy()
            part.master, part.grad = parts.master[start:stop], parts.grad[start:stop]
            part.out = None if parts.out is None else parts.out[start:stop]
            scales = slice(start // BLOCK, start // BLOCK + 5)
            part.states = [(kept[start:stop], None if s is None else s[scales]) for kept, s in parts.states]
            part.step(**numbers, place=100 + start)
    finally:
        loader.set_mode("auto")
    assert all(torch.equal(a, b) for a, b in zip(whole.all(), parts.all(), strict=True))


def test_without_numba_chunks_go_through_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(narrow_host, "kernel", lambda name: None)
    for master, kind in CASES:
        compare_bits(master, kind, 300_003, "cpu")


def test_wrong_tensors_are_refused() -> None:
    args = AdamArgs(
        lr=0.1, weight_decay=0.0, multiplier=1.0, beta1=0.9, beta2=0.999, eps=1e-8, decoupled=True
    )
    flat, codes, scale = torch.zeros(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2, 1)
    cases: list[tuple[str, Tensor, States]] = [
        ("expected 2", flat, [(codes, scale)]),
        ("as the first", flat, [(codes, scale), (flat, None)]),
        (r"scales of shape \[2, 1\]", flat, [(codes, scale[:1]), (codes, scale)]),
        ("master is torch.float16", flat.half(), [(codes, scale), (codes, scale)]),
        ("state 1 has 299 elements", flat, [(codes[1:], scale), (codes, scale)]),
    ]
    for words, master, states in cases:
        with pytest.raises(ValueError, match=words):
            narrow_step(master, states, flat, None, 1.0, args)


# -- by the rule of an optimizer


def optimizer_of(kind: str, **group: Any) -> torch.optim.Optimizer:
    parameter = {"params": [torch.nn.Parameter(torch.zeros(4))], **group}
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": lambda: torch.optim.AdamW([parameter], fused=True),
        "SGD": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
        "Lion": lambda: Lion([parameter]),
        "Adagrad": lambda: torch.optim.Adagrad([parameter]),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_the_rule_keeps_narrow_state(kind: str, state_dtype: str) -> None:
    rule = UpdateRule(optimizer_of(kind, state_dtype=state_dtype))
    leaf, state = torch.randn(700), defaultdict(dict)  # type: ignore[var-annotated]
    for _ in range(3):
        rule.begin(2.0)
        assert rule.apply([SliceUpdate(0, leaf, torch.randn(700))], state, live=True) is False
    own = state[leaf]
    dtype = torch.uint8 if state_dtype == "int8" else torch.bfloat16
    names = [name for name in own if name + SCALE in own]
    assert names and all(own[name].dtype == dtype for name in names) and float(own["step"]) == 3
    assert widen_all(own).keys() == {"step", *names}
    rule.optimizer.param_groups[0]["state_dtype"] = "fp32" if state_dtype == "bf16" else "bf16"
    rule.begin(2.0)
    out = torch.zeros(700, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="set state_dtype before zlaunch"):
        rule.apply([SliceUpdate(0, leaf, torch.randn(700), out)], state)


def test_momentum_without_a_count_is_kept() -> None:
    """A plain SGD's momentum comes without a count of steps: the next step is not its first."""
    rule = UpdateRule(optimizer_of("SGD", state_dtype="bf16"))
    leaf = torch.zeros(4)
    own: dict[str, Any] = {}
    put(own, "momentum_buffer", torch.full((4,), 8.0), "bf16")
    rule.begin(1.0)
    rule.apply([SliceUpdate(0, leaf, torch.zeros(4))], {leaf: own})
    torch.testing.assert_close(leaf, torch.full((4,), -0.1 * 0.9 * 8))


@pytest.mark.parametrize(
    ("kind", "group", "dtype", "words"),
    [
        ("Adagrad", {"state_dtype": "int8"}, torch.float32, "not supported with Adagrad"),
        ("Adagrad", {}, torch.bfloat16, 'bf16.master_weights "stochastic" is not supported with Adagrad'),
        ("AdamW", {"state_dtype": "int4"}, torch.float32, "expected one of fp32, bf16, int8"),
        ("AdamW", {"state_dtype": "bf16", "amsgrad": True}, torch.float32, "amsgrad of AdamW"),
        ("AdamW", {"state_dtype": "bf16", "fused": False}, torch.float32, "fused=False of AdamW"),
        ("AdamW", {"state_dtype": "bf16", "maximize": True}, torch.bfloat16, "maximize of AdamW"),
        ("SGD", {"state_dtype": "bf16", "foreach": True}, torch.float32, "foreach of SGD"),
        ("SGD", {"state_dtype": "bf16", "momentum": 0.0}, torch.float32, "without momentum has no state"),
        ("Lion", {"state_dtype": "int8"}, torch.float64, "master values of torch.float64"),
    ],
)
def test_what_no_kernel_steps_is_refused(
    kind: str, group: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    optimizer = optimizer_of(kind, **group)
    with pytest.raises(ValueError, match=words):
        needs_kernel(optimizer, optimizer.param_groups[0], dtype)


def test_what_is_wide_needs_no_kernel() -> None:
    optimizer = optimizer_of("Adagrad", state_dtype="fp32")
    assert not needs_kernel(optimizer, optimizer.param_groups[0], torch.float64)
