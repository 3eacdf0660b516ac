"""Applies an optimizer's rule to flat pieces, in any memory and in any order."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.arguments import HALVES, Scalar
from ...cuda_ops.step import SliceUpdate, needs_kernel, rule_of
from ..log import warn

State = MutableMapping[Tensor, dict[str, Any]]

PARAMETER_STATE = "parameter_state"
"""Names the entry of a slice's state that has the tensors of its whole parameter, in a dict by name: one
outside of it that happens to have as many elements as the slice would be taken for state of each element.
"""


class UpdateRule:
    """Applies a torch optimizer's rule, piece by piece.

    Between :meth:`begin` and :meth:`end` the hyper-parameters are those of :meth:`begin`: a scheduler may
    change the optimizer's while pieces are still being updated in the background. Each call works on a shadow
    of the optimizer: equal attributes, separate ``param_groups``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups: list[dict[str, Any]] = []
        self._after: list[dict[str, Any]] = []
        self._stepped: set[int] = set()
        """Lists the groups that torch's code has stepped since :meth:`begin`."""
        self._warned = False
        self._kernel = rule_of(optimizer)
        self._args: dict[int, Any] = {}
        """Caches the kernels' arguments of each group, since :meth:`begin`."""
        self.divisor: Scalar = 1.0
        self.found_inf: Tensor | None = None

    def begin(self, divisor: Scalar, found_inf: Tensor | None = None) -> None:
        """Copy the present hyper-parameters; gradients are to be divided by ``divisor``.

        Where ``found_inf`` (0-dim, on the device) is not 0, pieces there are left as they are; then their
        step counts live on the device, too.
        """
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._after = [dict(group) for group in self._groups]
        self._args = {}
        self._stepped = set()
        self.divisor = divisor
        self.found_inf = found_inf

    def end(self) -> None:
        """Copy group entries that the optimizer itself changed (counters) back to it."""
        absent = set(range(len(self._groups))) - self._stepped
        if absent and self._kernel is None:
            self._step_absent(absent)
        groups = zip(self.optimizer.param_groups, self._groups, self._after, strict=True)
        for live, before, after in groups:
            for key, value in after.items():
                # Only what the step has changed: the script may have set other values while it ran in the
                # background.
                if key not in before or value is not before[key]:
                    live[key] = value

    def _step_absent(self, absent: set[int]) -> None:
        """Step groups of which this rank has no piece: torch's step changes their counters all the same.

        Some classes need a parameter in each group: they get one without elements.
        """
        try:
            self._step_shadow([], {}, absent)
            return
        except Exception:
            device = self.optimizer.param_groups[0]["params"][0].device
        nothing = [torch.zeros(0, device=device) for _ in absent]
        updates = [
            SliceUpdate(group, leaf, leaf.clone())
            for group, leaf in zip(sorted(absent), nothing, strict=True)
        ]
        try:
            self._step_shadow(updates, {}, absent)
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"{type(self.optimizer).__name__} cannot step a param group without parameters "
                    f"({type(error).__name__}: {error}): this rank has no shard of groups {sorted(absent)}, "
                    "so counters in these groups do not advance here"
                )

    def apply(self, updates: Sequence[SliceUpdate], state: State, *, live: bool = False) -> bool:
        """Update every piece once. ``state`` is keyed by leaf, as in the optimizer itself.

        With ``live`` the optimizer, which has all these leaves, steps itself, not a shadow of it: it keeps
        the attributes that it changes. Returns True if it did: then it may have changed leaves that had no
        gradient, too, and ``out`` of those that no kernel has stepped is not written.
        """
        rest: list[SliceUpdate] = []
        in_one_pass: list[SliceUpdate] = []
        # A kernel steps in one pass over memory; what it does not know of goes through torch's own code.
        for update in updates:
            (in_one_pass if self._fits(update) else rest).append(update)
        if in_one_pass and self._kernel is not None:
            self._kernel.step(
                in_one_pass, self._groups, state, self._args, 1.0 / self.divisor, self.found_inf
            )
        if rest:
            if live:
                self._step(self.optimizer, rest)
                self._stepped.update(range(len(self._groups)))
                return True
            self._step_shadow(rest, state, {update.group for update in rest})
            for update in rest:
                if update.out is not None:
                    update.out.copy_(update.leaf)
        return False

    def _fits(self, update: SliceUpdate) -> bool:
        """Tell whether one kernel pass does the step and the copy in 16 bits that has to be written."""
        group = self._groups[update.group]
        if needs_kernel(self.optimizer, group, update.leaf.dtype):
            return True
        # torch's code would need a copy of such a gradient in the master's dtype.
        narrow = update.grad.dtype in HALVES or (update.out is not None and update.out.dtype in HALVES)
        if not narrow or update.leaf.dtype != torch.float32 or self._kernel is None:
            return False
        return self._kernel.fits(group)

    def _step_shadow(self, updates: Sequence[SliceUpdate], state: State, indices: set[int]) -> None:
        """Step the groups with these indices."""
        # Without __init__, which would build state and groups, and may have any arguments.
        shadow: Any = object.__new__(type(self.optimizer))
        shadow.__dict__.update(self.optimizer.__dict__)
        # torch's schedulers wrap `step` in an attribute of the instance, bound to the live optimizer.
        shadow.__dict__.pop("step", None)
        shadow.state = state
        groups = []
        for index in sorted(indices):
            members = [update.leaf for update in updates if update.group == index]
            groups.append((index, {**self._groups[index], "params": members}))
        shadow.param_groups = [group for _, group in groups]
        self._step(shadow, updates)
        self._stepped |= indices
        for index, group in groups:
            self._after[index] = {key: value for key, value in group.items() if key != "params"}

    def _step(self, optimizer: Any, updates: Sequence[SliceUpdate]) -> None:
        """Step by torch's code, without hooks, on gradients that are divided."""
        for update in updates:
            wide = update.grad.dtype == update.leaf.dtype
            update.leaf.grad = update.grad if wide else update.grad.to(update.leaf.dtype)
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not updates:
            pass
        elif fused and getattr(optimizer, "_step_supports_amp_scaling", False):
            device = updates[0].leaf.device
            nothing = torch.zeros((), dtype=torch.float32, device=device)
            # torch's fused step divides by it and skips by found_inf in the same pass over memory.
            optimizer.grad_scale = _filled(self.divisor, device)
            optimizer.found_inf = nothing if self.found_inf is None else self.found_inf
        elif isinstance(self.divisor, Tensor) or self.divisor != 1.0:
            gradients = [u.leaf.grad for u in updates if u.leaf.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.divisor)
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            # The hooks of a step are called once by the engine, not for each piece.
            step = step.__wrapped__
        step(optimizer)
        for update in updates:
            update.leaf.grad = None  # the store owns the gradient's memory, and may give it to another unit


def _filled(value: Scalar, device: torch.device) -> Tensor:
    """Return a 0-dim fp32 tensor on the device, without a copy that the host waits for."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)


def is_elementwise(value: Any, leaf: Tensor) -> bool:
    """Tell whether a state entry has one number for each element of its leaf, which is flat or whole."""
    if not isinstance(value, Tensor) or value is leaf or value.shape != leaf.shape:
        return False
    return value.dim() > 0
