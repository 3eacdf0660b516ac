"""One optimizer step over a flat shard: unscale, clip, update and cast in a single pass.

On CUDA devices a kernel of ``kernels/step.cu``, on the CPU ``host``, else the twin in plain torch. The
scalars ``step``, ``lr``, ``multiplier`` and ``found_inf`` may be 0-dim float32 tensors on the shard's
device: a kernel reads them there, so the host never waits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import host, loader, twins
from .arguments import (
    FLOATS,
    HALVES,
    AdamArgs,
    LionArgs,
    Scalar,
    SgdArgs,
    StepArgs,
    check_flat,
    check_range,
    check_scalar,
)
from .narrow_state import SCALE, STATE_DTYPES, fresh, kind_of
from .narrow_step import narrow_step

# -- step -------------------------------------------------------------------------------------------


@torch.no_grad()
def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs,
) -> None:
    """Step Adam, or AdamW if ``args.decoupled``, on ``grad * args.multiplier``: the formulas of torch.optim.

    ``master``, ``exp_avg``, ``exp_avg_sq``: flat fp32 of n elements, updated in place. ``grad``: n elements
    of fp32, bf16 or fp16. ``out``: None, or n elements of bf16 or fp16 that get the cast of the new master.
    ``step``: the count with this step in it, 1 at the first.

    Bytes a parameter, 16 bit in and out: 2 (grad) + 12 + 12 (state, read and written) + 2 (out) = 28.
    ``grad`` is left as it is, with one exception: on the CPU, in fp32 and without ``out``, this is torch's
    fused operation with ``grad_scale``, which leaves the unscaled gradient behind. Raises ValueError for
    wrong dtypes, shapes or devices.
    """
    _check(master, grad, out, args, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_scalar("step", step, master)
    if not isinstance(step, Tensor):
        check_range("step", step, 1.0, math.inf)
    if loader.use_kernels(master):
        _launch(
            "adam",
            (master, exp_avg, exp_avg_sq, grad, out),
            (step, args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.adam if host.wanted(master) else twins.adam
    run(master, exp_avg, exp_avg_sq, grad, out, step, args)


@torch.no_grad()
def sgd_step(
    master: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: SgdArgs,
) -> None:
    """Step torch.optim.SGD on ``grad * args.multiplier``; tensors and errors as in :func:`adam_step`.

    ``momentum_buffer``: flat fp32 like ``master``, or None if ``momentum`` is 0. At step 1 it becomes the
    gradient, whatever it held. Bytes a parameter, 16 bit in and out: 2 + 8 + 8 + 2 = 20, 12 without momentum.
    """
    _check(master, grad, out, args, momentum_buffer=momentum_buffer)
    check_scalar("step", step, master)
    momentum = args.momentum
    if (momentum_buffer is None) != (momentum == 0):
        raise ValueError(
            f"momentum_buffer is {'missing' if momentum else 'given'}, but momentum is {momentum}"
        )
    if loader.use_kernels(master):
        _launch(
            "sgd",
            (master, momentum_buffer, grad, out),
            (step, args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.sgd if host.wanted(master) else twins.sgd
    run(master, momentum_buffer, grad, out, step, args)


@torch.no_grad()
def lion_step(master: Tensor, exp_avg: Tensor, grad: Tensor, out: Tensor | None, args: LionArgs) -> None:
    """Step Lion on ``grad * args.multiplier``; tensors and errors as in :func:`adam_step`.

    The formula is Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), weight
    decay decoupled. Bytes a parameter, 16 bit in and out: 2 + 8 + 8 + 2 = 20.
    """
    _check(master, grad, out, args, exp_avg=exp_avg)
    if loader.use_kernels(master):
        _launch(
            "lion",
            (master, exp_avg, grad, out),
            (args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.lion if host.wanted(master) else twins.lion
    run(master, exp_avg, grad, out, args)


def _check(master: Tensor, grad: Tensor, out: Tensor | None, args: StepArgs, **state: Tensor | None) -> None:
    check_flat("master", master, (torch.float32,))
    for name, tensor in state.items():
        if tensor is not None:
            check_flat(name, tensor, (torch.float32,), master)
    check_flat("grad", grad, FLOATS, master)
    if out is not None:
        check_flat("out", out, HALVES, master)
    check_scalar("lr", args.lr, master)
    check_scalar("multiplier", args.multiplier, master)
    if args.found_inf is not None:
        check_scalar("found_inf", args.found_inf, master)


def _launch(
    kernel: str,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Scalar | None, ...],
    coefficients: tuple[float, ...],
) -> None:
    """Launch a kernel of ``step.cu``: ``tensors`` end with grad and out; a found_inf of None is 0."""
    *_, grad, out = tensors
    assert grad is not None
    if grad.numel() == 0:
        return
    flat = [part for value in scalars for part in loader.scalar(0.0 if value is None else value)]
    loader.launch(
        "step",
        kernel,
        *tensors,
        grad.numel(),
        *flat,
        *coefficients,
        device=grad.device,
        blocks=loader.vector_blocks(grad),
        defines=(loader.define("GRAD", grad.dtype), loader.define("OUT", None if out is None else out.dtype)),
    )


# -- step rules -------------------------------------------------------------------------------------
#
# Chooses the kernel that steps an optimizer's pieces in one pass, and makes its arguments.


_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Names the variants of torch's optimizers that no kernel has."""


@dataclass(slots=True)
class SliceUpdate:
    """Describes one flat piece of a param group and its gradient, of equal length and on one device."""

    group: int
    """Index of the optimizer's param group."""
    leaf: Tensor
    """Master values, changed in place; the key of the optimizer's state."""
    grad: Tensor
    """Holds the summed gradient, still scaled. It may be overwritten."""
    out: Tensor | None = None
    """Receives the updated values, cast to its dtype."""
    place: tuple[int, int] = (0, 0)
    """Tells its elements apart where they are rounded at random: a number of the unit, the first in it."""


class StepRule(ABC):
    """Steps flat pieces of a class of optimizers by one kernel."""

    counts = False
    """Tells whether fp32 state has a count of steps; narrow state, which is rounded by it, has one anyway."""

    def fits(self, group: Mapping[str, Any]) -> bool:
        """Tell whether the kernel computes what a param group asks for."""
        return not any(group.get(key) for key in _VARIANTS)

    @abstractmethod
    def states(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Name the states of each element, in the order of the kernel."""

    @abstractmethod
    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> Any:
        """Make the kernel's arguments for a param group, once for all its pieces."""

    @abstractmethod
    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        """Step one piece in fp32 with its optimizer state ``own``, which is made where it is missing."""

    def step(
        self,
        pieces: Sequence[SliceUpdate],
        groups: Sequence[Mapping[str, Any]],
        state: MutableMapping[Tensor, dict[str, Any]],
        made: MutableMapping[int, Any],
        multiplier: Scalar,
        found_inf: Tensor | None,
    ) -> None:
        """Step all pieces, of these param groups. ``made`` keeps the arguments of each group. Raises
        ValueError where a group's ``state_dtype`` is not that of its state.
        """
        narrow = [is_narrow_step(groups[piece.group], piece.leaf.dtype) for piece in pieces]
        counted = [piece.leaf for piece, each in zip(pieces, narrow, strict=True) if each or self.counts]
        _count(counted, state, 1.0 if found_inf is None else 1.0 - found_inf)
        for piece, each in zip(pieces, narrow, strict=True):
            own = state.setdefault(piece.leaf, {})
            group = groups[piece.group]
            args = made.get(piece.group)
            if args is None:
                args = made[piece.group] = self.args(group, multiplier, found_inf)
            leaf = piece.leaf.detach()
            kind = group.get("state_dtype") or "fp32"
            names = self.states(group)
            if each or self.counts:
                for name in names:
                    if own.get(name) is None:
                        own.update(fresh(leaf, name, kind))
            _check_kinds(own, kind, names)
            if each:
                pairs = [(own[name], own.get(name + SCALE)) for name in names]
                key, place = piece.place
                narrow_step(leaf, pairs, piece.grad, piece.out, own["step"], args, key=key, place=place)
            else:
                self.run(leaf, piece.grad, piece.out, own, args)


def _count(leaves: Sequence[Tensor], state: MutableMapping[Tensor, dict[str, Any]], advance: Scalar) -> None:
    """Add ``advance`` to the step counts of pieces."""
    for leaf in leaves:
        own = state.setdefault(leaf, {})
        # momentum without a count, as plain SGD keeps it, is that of a later step than the first
        count = own.get("step", 0.0 if own.get("momentum_buffer") is None else 1.0)
        if not isinstance(count, Tensor):  # torch's fused step has it on the device, too
            own["step"] = torch.full((), float(count), device=leaf.device)
        elif count.device != leaf.device:  # as a checkpoint of an optimizer without fused steps gives it
            own["step"] = count.to(leaf.device)
    counts = [state[leaf]["step"] for leaf in leaves]
    if counts and isinstance(advance, Tensor):  # a list, or torch may ask for the number
        torch._foreach_add_(counts, [advance] * len(counts))
    elif counts:
        torch._foreach_add_(counts, advance)


def _check_kinds(own: Mapping[str, Any], kind: str, names: Sequence[str]) -> None:
    for key in names:
        if own.get(key) is not None and kind_of(own, key) != kind:
            raise ValueError(
                f'a param group has "state_dtype" {kind!r}, but its {key} has dtype {kind_of(own, key)}: '
                "set state_dtype before zlaunch.initialize and do not change it later"
            )


def is_narrow_step(group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Tell whether a param group's state, or the master values of this dtype, have fewer than 32 bits."""
    return (group.get("state_dtype") or "fp32") != "fp32" or dtype in HALVES


def needs_kernel(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Tell whether a param group's state, or the master values of this dtype, have fewer than 32 bits:
    torch's own step would round them to the nearest. Raises ValueError if they have and no kernel steps them.
    """
    if not is_narrow_step(group, dtype):
        return False
    kind = group.get("state_dtype") or "fp32"
    name = type(optimizer).__name__
    rule = rule_of(optimizer)
    if kind not in STATE_DTYPES:
        raise ValueError(f"state_dtype of {name} is {kind!r}, expected one of {', '.join(STATE_DTYPES)}")
    what = f'state_dtype "{kind}"' if kind != "fp32" else 'bf16.master_weights "stochastic"'
    if rule is None:
        raise ValueError(f"{what} is not supported with {name}: use Adam, AdamW, SGD or Lion")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{what} is not supported for master values of {dtype}")
    if kind != "fp32" and not rule.states(group):
        raise ValueError(f"{name} without momentum has no state: remove {what}")
    chosen = [key for key in (*_VARIANTS, "foreach") if group.get(key)]
    chosen += ["fused=False"] if group.get("fused") is False and rule.counts else []
    if chosen:
        raise ValueError(f"{what} is not supported with {chosen[0]} of {name}: remove one of them")
    return True


def common_args(group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> dict[str, Any]:
    """Return the arguments that all kernels take."""
    decay = float(group["weight_decay"])
    rate = group["lr"]
    if isinstance(rate, Tensor):
        # A kernel reads a rate on the device in fp32, and no other tensor.
        rate = float(rate) if rate.device.type == "cpu" else rate.to(torch.float32).reshape(())
    return {"lr": rate, "weight_decay": decay, "multiplier": multiplier, "found_inf": found_inf}


class AdamRule(StepRule):
    """Steps torch's fused Adam and AdamW."""

    counts = True

    def __init__(self, *, decoupled: bool) -> None:
        """``decoupled``: weight decay always acts on the parameter, not on the gradient."""
        self._decoupled = decoupled

    def fits(self, group: Mapping[str, Any]) -> bool:
        return super().fits(group) and bool(group.get("fused"))

    def states(self, group: Mapping[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> AdamArgs:
        beta1, beta2 = map(float, group["betas"])
        return AdamArgs(
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay")),
            **common_args(group, multiplier, found_inf),
        )

    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        adam_step(leaf, own["exp_avg"], own["exp_avg_sq"], grad, out, own["step"], args)


class SgdRule(StepRule):
    """Steps torch's SGD."""

    def fits(self, group: Mapping[str, Any]) -> bool:
        return super().fits(group) and not group.get("foreach")

    def states(self, group: Mapping[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> SgdArgs:
        return SgdArgs(
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            **common_args(group, multiplier, found_inf),
        )

    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        first = own.get("momentum_buffer") is None
        if first and args.momentum:
            own["momentum_buffer"] = torch.zeros_like(leaf)
        sgd_step(leaf, own.get("momentum_buffer"), grad, out, 1.0 if first else 2.0, args)


_RULES: dict[type[torch.optim.Optimizer], StepRule] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SgdRule(),
}


def rule_of(optimizer: torch.optim.Optimizer) -> StepRule | None:
    """Return the rule of an optimizer's class: torch's, or a class's own ``step_rule``. A subclass, which may
    step in another way, has none.
    """
    kind = type(optimizer)
    own = vars(kind).get("step_rule")
    return own if isinstance(own, StepRule) else _RULES.get(kind)
