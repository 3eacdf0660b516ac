"""Chooses the kernel that steps an optimizer's pieces in one pass, and makes its arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .arguments import HALVES, AdamArgs, Scalar, SgdArgs
from .narrow_state import SCALE, STATE_DTYPES, fresh, kind_of
from .narrow_step import narrow_step
from .step import adam_step, sgd_step

_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Names the variants of torch's optimizers that no kernel has."""


class StepPiece(Protocol):
    """Describes one flat piece and its gradient; see ``SliceUpdate`` of the runtime."""

    group: int
    leaf: Tensor
    grad: Tensor
    out: Tensor | None
    place: tuple[int, int]


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
        pieces: Sequence[StepPiece],
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
            own, group = state.setdefault(piece.leaf, {}), groups[piece.group]
            args = made.get(piece.group)
            if args is None:
                args = made[piece.group] = self.args(group, multiplier, found_inf)
            leaf, kind = piece.leaf.detach(), group.get("state_dtype") or "fp32"
            names = self.states(group)
            for name in names if each or self.counts else ():
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
    kind, name, rule = group.get("state_dtype") or "fp32", type(optimizer).__name__, rule_of(optimizer)
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
    return {"lr": group["lr"], "weight_decay": decay, "multiplier": multiplier, "found_inf": found_inf}


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
