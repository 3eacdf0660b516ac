"""One optimizer step over the flat shards of all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...cuda_ops.arguments import Scalar
from ...cuda_ops.norm import prepare_step
from .. import stopping
from ..comm import Comm
from ..offload.gradients import squares_of
from ..offload.place import Offload, Place
from ..step_result import StepResult
from ..zero.grads import GradientReducer
from ..zero.unit import Unit
from .away import Away
from .initial_state import give_initial_state, take_initial_state
from .rule import Rule, Update
from .runs import Label, Run, make_runs, separate_unused, split_runs

_NEEDS_SHAPES = {"Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers whose update of an element depends on the parameter's shape or on other elements."""


def _step_elsewhere(self: torch.optim.Optimizer, closure: Any = None) -> None:
    raise RuntimeError(
        "this optimizer belongs to a zlaunch engine: call engine.step() instead of optimizer.step()"
    )


# torch's schedules ask their optimizer whether they come after its step; the engine sees to that.
_step_elsewhere._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class ShardStep:
    """Turns a torch optimizer on parameters into one on this rank's shards, in place.

    The optimizer object stays the caller's (schedulers keep working, ``param_groups`` stay live); only the
    tensors in its groups are replaced. Raises ValueError for an optimizer that cannot work on flat shards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        reducer: GradientReducer,
        comm: Comm,
        *,
        sharded: bool,
        offload: Offload | None = None,
        background: bool = False,
        on_device: bool = False,
    ) -> None:
        """``background``: what is offloaded is updated while the caller goes on. ``on_device``: decisions are
        made there where that is possible, so that the host never waits for it.
        """
        kind = type(optimizer).__name__
        if kind in _NEEDS_SHAPES:
            raise ValueError(
                f"optimizer {kind} needs whole matrices, but ZeRO gives it flat shards: use Adam, AdamW, "
                "SGD or another optimizer that treats every element by itself"
            )
        initial = take_initial_state(optimizer)
        self.optimizer, self.units, self._reducer, self._comm, self._sharded = (
            optimizer,
            units,
            reducer,
            comm,
            sharded,
        )
        self._runs = make_runs(units)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [run.leaf for run in self._runs if run.group == index and run.leaf is not None]
        give_initial_state(optimizer, initial, self._runs)
        self._fused = self._choose_fused()
        self._rule = Rule(optimizer)
        self._written: set[int] = set()
        """Units whose values beside the master the last step has written already."""
        self._away = Away(offload, units, comm, background) if offload is not None else None
        self.decides_on_device = on_device and self._fused and self._away is None
        self._real_step = optimizer.step
        optimizer.step = MethodType(_step_elsewhere, optimizer)  # type: ignore[method-assign]
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _choose_fused(self) -> bool:
        """Use torch's one-pass kernels where the caller did not choose an implementation himself."""
        floats = all(torch.promote_types(unit.dtype, torch.float32) == torch.float32 for unit in self.units)
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not floats:
            return False
        for group in self.optimizer.param_groups:
            chosen = group.get("fused") is not None or group.get("foreach") is not None
            if not chosen and not group.get("differentiable") and not group.get("capturable"):
                group["fused"] = True
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        if fused:
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        return fused

    @property
    def runs(self) -> Sequence[Run]:
        """The pieces of this rank's shards that the optimizer sees; :meth:`wait` before their values are
        read.
        """
        return self._runs

    def split(self, label: Callable[[Unit, int], Label]) -> list[tuple[Run, Label]]:
        """Cut the runs so that the parameters of each have one label; all runs with theirs."""
        labelled = split_runs(self._runs, label, self.optimizer)
        self._runs = [run for run, _ in labelled]
        return labelled

    def step(self, *, divisor: Scalar, clip: float, check_finite: bool) -> StepResult:
        """Average, unscale, clip and apply the gradients, unless they are not finite.

        ``divisor`` is what the summed gradients have to be divided by (ranks x micro-batches x loss scale);
        ``clip`` is the largest norm allowed, 0 for any; with ``check_finite`` a step with inf or NaN is
        skipped on every rank. Afterwards every unit that stays FULL is on its way to its new values.
        """
        self.wait()
        for unit in self.units:
            if not unit.shard_params:
                # nothing touched it since the last step, whose values may still be arriving
                unit.ensure_full()
        mine = self._reducer.used()
        agreed = self._agree(mine)
        if self.decides_on_device and all(mine):
            result = self._step_on_device(agreed, divisor, clip, check_finite)
        else:
            result = self._step_by_host(agreed, float(divisor), clip, check_finite)
        self._reducer.clear()
        return result

    def _step_by_host(self, agreed: Tensor, divisor: float, clip: float, check_finite: bool) -> StepResult:
        square, stop, *counts = agreed.tolist()
        norm = math.sqrt(square) / divisor if square >= 0 else math.nan
        skipped = check_finite and not math.isfinite(norm)
        if not skipped:
            coefficient = 1.0
            if clip > 0 and norm > clip:
                coefficient = clip / (norm + 1e-6)
            self._comm.settle()
            # a norm of infinity clips everything finite to nothing and leaves NaN, as torch's clipping does
            self._rule.begin(divisor / coefficient if coefficient else math.inf)
            self._apply([count > 0 for count in counts])
        return StepResult(norm, skipped, stop)

    def _step_on_device(self, agreed: Tensor, divisor: Scalar, clip: float, check_finite: bool) -> StepResult:
        """The same without a number that the host has to see: every parameter has a gradient."""
        norm, multiplier, found_inf = prepare_step(agreed[0], divisor=divisor, clip=clip)
        self._comm.settle()
        self._rule.begin(1.0 / multiplier, found_inf if check_finite else None)
        self._apply([True] * (agreed.numel() - 2))
        return StepResult(norm, found_inf if check_finite else torch.zeros_like(found_inf), agreed[1])

    def check(self) -> None:
        """Raises what ended a step half-way: the values are of two steps then, and nothing may go on."""
        if self._away is not None:
            self._away.check()

    def finish(self) -> None:
        """No step will follow. Raises what ended the last one early, if nobody has been told."""
        if self._away is not None:
            self._away.finish()

    def wait(self) -> None:
        """Return when the last step has ended everywhere. Raises what ended it early, a DiskError for one."""
        if self._away is not None:
            self._away.wait()

    def _agree(self, used: list[bool]) -> Tensor:
        """The sum of squares of all gradients, how many ranks want to stop, and for each parameter how many
        had a gradient: one all-reduce, float64 on the device.
        """
        device = self._comm.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if squares := self._squares():
            total = torch.stack(squares).sum()
        if not self._sharded:
            total = total / self._comm.world_size  # every rank holds all of it
        flags = [float(stopping.asked()), *map(float, used)]
        mine = _to_device(torch.tensor(flags, dtype=torch.float64), device)
        return self._comm.all_reduce_scalars(torch.cat([total.reshape(1), mine]))

    def _squares(self) -> list[Tensor]:
        """Of every cut of every unit, in order: the sum is the same wherever the gradients are."""
        squares: list[Tensor] = []
        for unit in self.units:
            if unit.gradient_home is not None:
                if unit.gradient_home.delivered:
                    squares += [square.to(self._comm.device) for square in unit.gradient_home.squares()]
            elif unit.grad is not None:
                squares += squares_of(unit.grad, unit.cuts)
        return squares

    def _apply(self, used: list[bool]) -> None:
        self._runs = separate_unused(self._runs, self.units, used, self.optimizer)
        self._apply_here(self._rule.divisor, self._rule.found_inf)
        if self._away is not None:
            self._away.start(self._rule, self._runs)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        stay = [unit for unit in self.units if not unit.shard_params]
        for unit in self.units:
            unit.send_home()
        for unit in stay:
            if self._away is None or not self._away.brings(unit):
                unit.start_refresh(written=id(unit) in self._written)
        if self._comm.settle():
            for unit in stay:
                if self._away is None or not self._away.brings(unit):
                    unit.ensure_full()

    def _apply_here(self, divisor: Scalar, found_inf: Tensor | None) -> None:
        """Update what is on the device: in one pass with the copy in 16 bits where there is such a kernel,
        the rest by the optimizer's own step.
        """
        rest: list[Tensor] = []
        missed: set[int] = set()
        self._written.clear()
        for run in self._runs:
            if run.unit.state_place is not Place.DEVICE or not run.used or run.unit.grad is None:
                continue
            assert run.leaf is not None
            grad = run.unit.grad[run.start : run.stop]
            out = run.unit.values_beside_master
            if out is not None and self._rule.has_kernel(run.group, run.leaf, out):
                out = out[run.start : run.stop]
                self._rule.apply([Update(run.group, run.leaf, grad, out)], self.optimizer.state)
                self._written.add(id(run.unit))
            else:
                missed.add(id(run.unit))
                run.leaf.grad = grad
                rest.append(run.leaf)
        self._written -= missed
        if not rest:
            return
        if self._fused:
            device = self._comm.device
            skip = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf
            self.optimizer.grad_scale = _filled(divisor, device)  # type: ignore[attr-defined]
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        elif isinstance(divisor, Tensor) or divisor != 1.0:
            torch._foreach_mul_([leaf.grad for leaf in rest if leaf.grad is not None], 1.0 / divisor)
        self._real_step()
        for leaf in rest:
            leaf.grad = None

    def nonfinite_names(self) -> list[str]:
        """Parameters with inf or NaN in this rank's shard of the gradients."""
        names: list[str] = []
        for unit in self.units:
            if unit.gradient_home is not None:  # as closely as is known where it rests
                squares = unit.gradient_home.squares() if unit.gradient_home.delivered else []
                bad = [cut for cut, square in zip(unit.cuts, squares, strict=False) if not square.isfinite()]
                for low, high in bad:
                    slots = unit.layout.overlaps(unit.start + low, unit.start + high)
                    names += [unit.names[index] for index, _, _ in slots]
                continue
            if unit.grad is None:
                continue
            for index, first, last in unit.layout.overlaps(unit.start, unit.stop):
                if not bool(torch.isfinite(unit.grad[first - unit.start : last - unit.start]).all()):
                    names.append(unit.names[index])
        return names


def _filled(value: Scalar, device: torch.device) -> Tensor:
    """A 0-dim fp32 tensor on the device, without a copy that the host waits for."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor's copy that the host does not wait for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def parameter_groups(parameters: Any, model: nn.Module) -> list[dict[str, Any]]:
    """``model_parameters`` as optimizer groups: None, an iterable of parameters, or of dicts with "params".

    Frozen parameters are left out. Raises ValueError if one is not a parameter of ``model`` or is listed
    twice.
    """
    listed: list[Any] = list(model.parameters()) if parameters is None else list(parameters)
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    known = {id(p) for p in model.parameters()}
    seen: set[int] = set()
    result = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        for parameter in members:
            if id(parameter) not in known:
                raise ValueError("model_parameters holds a tensor that is not a parameter of the model")
            if id(parameter) in seen:
                raise ValueError("model_parameters holds a parameter twice")
            seen.add(id(parameter))
        result.append({**group, "params": [p for p in members if p.requires_grad]})
    return result
