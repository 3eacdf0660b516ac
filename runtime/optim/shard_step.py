"""One optimizer step over the flat shards of all units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import stopping
from ..comm import Comm
from ..zero.grads import GradientReducer
from ..zero.unit import Unit

_NEEDS_SHAPES = {"Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers whose update of an element depends on the parameter's shape or on other elements."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. ``norm`` is that of the averaged, unscaled gradient before clipping."""

    norm: float
    skipped: bool
    stop: bool
    """Some rank has been asked to save and stop; the same on all ranks."""


@dataclass(slots=True)
class _Run:
    """A piece of a unit's shard as the optimizer sees it: a leaf tensor over the master values."""

    unit: Unit
    start: int
    stop: int
    leaf: Tensor
    used: bool = True


def _step_elsewhere(self: torch.optim.Optimizer, closure: Any = None) -> None:
    raise RuntimeError(
        "this optimizer belongs to a zlaunch engine: call engine.step() instead of optimizer.step()"
    )


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
    ) -> None:
        kind = type(optimizer).__name__
        if kind in _NEEDS_SHAPES:
            raise ValueError(
                f"optimizer {kind} needs whole matrices, but ZeRO gives it flat shards: use Adam, AdamW, "
                "SGD or another optimizer that treats every element by itself"
            )
        if optimizer.state:
            raise ValueError(
                f"optimizer {kind} has state from earlier steps: pass a new one to zlaunch.initialize, "
                "and load its state afterwards"
            )
        self.optimizer, self.units, self._reducer, self._comm, self._sharded = (
            optimizer,
            units,
            reducer,
            comm,
            sharded,
        )
        self._runs: list[_Run] = []
        leaves: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for unit in units:
            for piece in unit.pieces:
                assert unit.master is not None
                leaf = unit.master[piece.start : piece.stop].detach().requires_grad_()
                self._runs.append(_Run(unit, piece.start, piece.stop, leaf))
                leaves[piece.group].append(leaf)
        for group, members in zip(optimizer.param_groups, leaves, strict=True):
            group["params"] = members
        self._fused = self._choose_fused()
        self._real_step = optimizer.step
        optimizer.step = MethodType(_step_elsewhere, optimizer)  # type: ignore[method-assign]

    def _choose_fused(self) -> bool:
        """Use torch's one-pass kernels where the caller did not choose an implementation himself."""
        floats = all(run.leaf.dtype == torch.float32 for run in self._runs)
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

    def step(self, *, divisor: float, clip: float, check_finite: bool) -> StepResult:
        """Average, unscale, clip and apply the gradients, unless they are not finite.

        ``divisor`` is what the summed gradients have to be divided by (ranks x micro-batches x loss scale);
        ``clip`` is the largest norm allowed, 0 for any; with ``check_finite`` a step with inf or NaN is
        skipped on every rank. Afterwards every unit that stays FULL is on its way to its new values.
        """
        for unit in self.units:
            if not unit.shard_params:
                # nothing touched it since the last step, whose values may still be arriving
                unit.ensure_full()
        norm, stop, used = self._agree(divisor)
        skipped = check_finite and not math.isfinite(norm)
        if not skipped:
            coefficient = 1.0
            if clip > 0 and norm > clip:
                coefficient = clip / (norm + 1e-6)
            self._comm.settle()
            self._apply(divisor / coefficient, used)
            stay = [unit for unit in self.units if not unit.shard_params]
            for unit in stay:
                unit.start_refresh()
            if self._comm.settle():
                for unit in stay:
                    unit.ensure_full()
        self._reducer.clear()
        return StepResult(norm, skipped, stop)

    def _agree(self, divisor: float) -> tuple[float, bool, list[bool]]:
        """The global gradient norm, whether to stop, which parameters any rank had a gradient for: one
        all-reduce.
        """
        parts = [run.unit.grad[run.start : run.stop] for run in self._runs if run.unit.grad is not None]
        device = self._comm.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if parts:
            norms = torch.stack(torch._foreach_norm(parts)).double()
            total = norms.square().sum()
        if not self._sharded:
            total = total / self._comm.world_size  # every rank holds all of it
        flags = torch.tensor(self._reducer.used(), dtype=torch.float64, device=device)
        own = torch.tensor([float(stopping.asked())], dtype=torch.float64, device=device)
        square, stop, *used = self._comm.all_reduce_scalars(
            torch.cat([total.reshape(1), own, flags])
        ).tolist()
        norm = math.sqrt(square) / divisor if square >= 0 else math.nan
        return norm, stop > 0, [count > 0 for count in used]

    def _apply(self, divisor: float, used: list[bool]) -> None:
        self._separate_unused(used)
        for run in self._runs:
            has_grad = run.used and run.unit.grad is not None
            run.leaf.grad = run.unit.grad[run.start : run.stop] if has_grad else None  # type: ignore[index]
        if self._fused:
            device = self._comm.device
            self.optimizer.grad_scale = torch.tensor(divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            self.optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        elif divisor != 1.0:
            gradients = [run.leaf.grad for run in self._runs if run.leaf.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1.0 / divisor)
        self._real_step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        for run in self._runs:
            run.leaf.grad = None

    def _separate_unused(self, used: list[bool]) -> None:
        """Mark the runs that hold parameters without a gradient on any rank; torch leaves such parameters
        alone.

        A run that holds both kinds is split for good, its state with it: each part counts its own steps.
        """
        if all(used):
            for run in self._runs:
                run.used = True
            return
        flags = iter(used)
        unused = {
            (id(unit), i) for unit in self.units for i in range(len(unit.parameters)) if not next(flags)
        }
        runs: list[_Run] = []
        for run in self._runs:
            parts = self._parts(run, unused)
            if len(parts) == 1:
                run.used = parts[0][2]
                runs.append(run)
            else:
                runs += self._split(run, parts)
        self._runs = runs

    def _parts(self, run: _Run, unused: set[tuple[int, int]]) -> list[tuple[int, int, bool]]:
        """``(start, stop, used)`` of the parts of a run, in shard coordinates, without gaps between them."""
        first = run.unit.start
        parts: list[tuple[int, int, bool]] = []
        for index, low, _ in run.unit.layout.overlaps(first + run.start, first + run.stop):
            used = (id(run.unit), index) not in unused
            if not parts:
                parts.append((run.start, run.stop, used))
            elif parts[-1][2] != used:
                start, _, before = parts[-1]
                parts[-1] = (start, low - first, before)
                parts.append((low - first, run.stop, used))
        return parts

    def _split(self, run: _Run, parts: list[tuple[int, int, bool]]) -> list[_Run]:
        state = self.optimizer.state.pop(run.leaf, {})
        made = []
        for start, stop, used in parts:
            low, high = start - run.start, stop - run.start
            leaf = run.leaf.detach()[low:high].requires_grad_()
            made.append(_Run(run.unit, start, stop, leaf, used))
            if state:
                self.optimizer.state[leaf] = {
                    key: value[low:high]
                    if _elementwise(value, run.leaf)
                    else (value.clone() if isinstance(value, Tensor) else value)
                    for key, value in state.items()
                }
        for group in self.optimizer.param_groups:
            position = next((i for i, leaf in enumerate(group["params"]) if leaf is run.leaf), None)
            if position is not None:
                group["params"][position : position + 1] = [part.leaf for part in made]
        return made

    def nonfinite_names(self) -> list[str]:
        """Parameters with inf or NaN in this rank's shard of the gradients."""
        names: list[str] = []
        for unit in self.units:
            if unit.grad is None:
                continue
            for index, first, last in unit.layout.overlaps(unit.start, unit.stop):
                if not bool(torch.isfinite(unit.grad[first - unit.start : last - unit.start]).all()):
                    names.append(unit.names[index])
        return names


def _elementwise(value: Any, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape and value.dim() == 1 and value is not leaf


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
