"""Applies an optimizer's rule to flat pieces, in any memory and in any order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.arguments import AdamArgs, LionArgs, Scalar, SgdArgs
from ...cuda_ops.step import adam_step, lion_step, sgd_step
from .lion import Lion

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(slots=True)
class SliceUpdate:
    """Describes one flat piece and its gradient, all of equal length and on one device."""

    group: int
    """Index of the optimizer's param group."""
    leaf: Tensor
    """Master values, changed in place; the key of the optimizer's state."""
    grad: Tensor
    """Holds the summed gradient, still scaled. It may be overwritten."""
    out: Tensor | None = None
    """Receives the updated values, cast to its dtype."""


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
        self._args: dict[int, AdamArgs | SgdArgs | LionArgs] = {}
        """Caches the kernels' arguments of each group, since :meth:`begin`."""
        self.divisor: Scalar = 1.0
        self.found_inf: Tensor | None = None
        self._multiplier: Scalar = 1.0
        self._advance: Scalar = 1.0
        """Adds to the step counts: 1, or 0 where the step is skipped."""

    def begin(self, divisor: Scalar, found_inf: Tensor | None = None) -> None:
        """Copy the present hyper-parameters; gradients are to be divided by ``divisor``.

        Where ``found_inf`` (0-dim, on the device) is not 0, pieces there are left as they are; then their
        step counts live on the device, too.
        """
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._after = [dict(group) for group in self._groups]
        self._args = {}
        self.divisor, self.found_inf = divisor, found_inf
        self._multiplier = 1.0 / divisor
        self._advance = 1.0 if found_inf is None else 1.0 - found_inf

    def end(self) -> None:
        """Copy group entries that the optimizer itself changed (counters) back to it."""
        groups = zip(self.optimizer.param_groups, self._groups, self._after, strict=True)
        for live, before, after in groups:
            for key, value in after.items():
                if key not in before or value is not before[key]:
                    live[key] = value

    def apply(self, updates: Sequence[SliceUpdate], state: State) -> None:
        """Update every piece once. ``state`` is keyed by leaf, as in the optimizer itself."""
        rest: list[SliceUpdate] = []
        in_one_pass: list[SliceUpdate] = []
        for update in updates:
            fits = self.has_kernel(update.group, update.leaf, update.out)
            (in_one_pass if fits else rest).append(update)
        self._count_step([update.leaf for update in in_one_pass], state)
        for update in in_one_pass:
            self._run_kernel(update, state)
        if rest:
            self._run_torch(rest, state)
            for update in rest:
                if update.out is not None:
                    update.out.copy_(update.leaf)

    def has_kernel(self, group: int, leaf: Tensor, out: Tensor | None) -> bool:
        """Tell whether one kernel pass does the step and the copy in 16 bits that has to be written."""
        narrow = out is not None and out.dtype in (torch.bfloat16, torch.float16)
        return narrow and leaf.dtype == torch.float32 and has_kernel(self.optimizer, self._groups[group])

    def _count_step(self, leaves: Sequence[Tensor], state: State) -> None:
        """Count this step in Adam's state, which is made where it is missing, of the leaves that have it."""
        if not leaves or not isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            return
        for leaf in leaves:
            own = state.setdefault(leaf, {})
            count = own.get("step", 0.0)
            if not isinstance(count, Tensor):  # torch's fused step has it on the device, too
                own["step"] = torch.full((), float(count), device=leaf.device)
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in own:
                    own[key] = torch.zeros_like(leaf.detach())
        counts = [state[leaf]["step"] for leaf in leaves]
        if isinstance(self._advance, Tensor):  # a list, or torch may ask for the number
            torch._foreach_add_(counts, [self._advance] * len(counts))
        else:
            torch._foreach_add_(counts, self._advance)

    def _run_kernel(self, update: SliceUpdate, state: State) -> None:
        args = self._args.get(update.group) or self._kernel_args(update.group)
        leaf = update.leaf.detach()
        own = state.setdefault(update.leaf, {})
        if isinstance(args, AdamArgs):
            adam_step(leaf, own["exp_avg"], own["exp_avg_sq"], update.grad, update.out, own["step"], args)
        elif isinstance(args, LionArgs):
            if "exp_avg" not in own:
                own["exp_avg"] = torch.zeros_like(leaf)
            lion_step(leaf, own["exp_avg"], update.grad, update.out, args)
        else:
            first = own.get("momentum_buffer") is None
            if first and args.momentum:
                own["momentum_buffer"] = torch.zeros_like(leaf)
            count = 1.0 if first else 2.0
            sgd_step(leaf, own.get("momentum_buffer"), update.grad, update.out, count, args)

    def _kernel_args(self, index: int) -> AdamArgs | SgdArgs | LionArgs:
        """Make the kernels' arguments for a group, once for all its pieces."""
        group = self._groups[index]
        common: dict[str, Any] = {
            "lr": group["lr"],
            "weight_decay": float(group["weight_decay"]),
            "multiplier": self._multiplier,
            "found_inf": self.found_inf,
        }
        args: AdamArgs | SgdArgs | LionArgs
        if isinstance(self.optimizer, torch.optim.SGD):
            args = SgdArgs(
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                nesterov=bool(group["nesterov"]),
                **common,
            )
        else:
            common["beta1"], common["beta2"] = map(float, group["betas"])
            if isinstance(self.optimizer, Lion):
                args = LionArgs(**common)
            else:
                decoupled = is_decoupled(self.optimizer, group)
                args = AdamArgs(eps=float(group["eps"]), decoupled=decoupled, **common)
        self._args[index] = args
        return args

    def _run_torch(self, updates: Sequence[SliceUpdate], state: State) -> None:
        optimizer, device = self.optimizer, updates[0].leaf.device
        shadow: Any = object.__new__(type(optimizer))
        shadow.__dict__.update(optimizer.__dict__)
        shadow.__dict__.pop("step", None)
        shadow.state = state
        groups = []
        for index, group in enumerate(self._groups):
            members = [update.leaf for update in updates if update.group == index]
            if members:
                groups.append((index, {**group, "params": members}))
        shadow.param_groups = [group for _, group in groups]
        fused = all(group.get("fused") for _, group in groups)
        for update in updates:
            wide = update.grad.dtype == update.leaf.dtype
            update.leaf.grad = update.grad if wide else update.grad.to(update.leaf.dtype)
        if fused and has_amp_scaling(optimizer):
            shadow.grad_scale = torch.as_tensor(self.divisor, dtype=torch.float32, device=device)
            shadow.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        elif isinstance(self.divisor, Tensor) or self.divisor != 1.0:
            gradients = [u.leaf.grad for u in updates if u.leaf.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.divisor)
        step_once(shadow)
        for update in updates:
            update.leaf.grad = None
        for index, group in groups:
            self._after[index] = {key: value for key, value in group.items() if key != "params"}

    def elementwise_states(self) -> int:
        """Count the tensors that the optimizer keeps per element, at most.

        Found by letting it make one step on a dummy. Raises ValueError if it cannot.
        """
        counts = [0]
        try:
            for index in range(len(self.optimizer.param_groups)):
                leaf = torch.zeros(16, requires_grad=True)
                state: State = defaultdict(dict)
                self.begin(1.0)
                with torch.no_grad():
                    self._run_torch([SliceUpdate(index, leaf, torch.zeros(16))], state)
                counts.append(sum(is_elementwise(value, leaf) for value in state[leaf].values()))
        except Exception as error:
            raise ValueError(
                f"optimizer {type(self.optimizer).__name__} cannot be offloaded to NVMe: a step on a flat "
                f"tensor failed: {error}"
            ) from error
        return max(counts)


def step_once(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer by its class's code, without hooks."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def has_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the fused step takes ``grad_scale`` and ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_kernel(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Tell whether the one-pass kernels know this optimizer, with these of its variants."""
    kind = type(optimizer)
    if any(group.get(key) for key in ("amsgrad", "maximize", "capturable", "differentiable")):
        return False
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return bool(group.get("fused"))
    return kind is Lion or (kind is torch.optim.SGD and not group.get("foreach"))


def is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Tell whether weight decay acts on the parameter (AdamW), not on the gradient."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def is_elementwise(value: Any, leaf: Tensor) -> bool:
    """Tell whether a state entry has one number for each element of its leaf, which is flat or whole."""
    if not isinstance(value, Tensor) or value is leaf or value.shape != leaf.shape:
        return False
    return value.dim() > 0
