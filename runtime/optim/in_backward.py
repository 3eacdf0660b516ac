"""Steps units one by one while the backward pass goes on.

The idea is that of "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO, Lv et
al., 2023): a gradient is used as soon as it is there, and its memory is given back.

Note [Why a unit may change]. A unit whose every parameter has had its gradient is used no more in this pass:
autograd accumulates a gradient when all that the loss has made of the parameter is done. Its sum is there
when every rank has sent its part, so no rank reads another's values of it any more either, be it through
shared memory. What a graph reads past its gradients (``parameter.detach()``, a recomputation of a shared
layer) is an error: the unit's generation and the parameters' versions move before the reduction begins.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from ...cuda_ops.step import SliceUpdate
from ..comm.collectives import Comm
from ..comm.pending import Pending
from ..device import named
from ..errors import OptimizerError
from ..zero import placeholder
from ..zero.reduce import Bucket, GradientReducer
from ..zero.unit import Unit
from .slices import ShardSlice
from .step import ShardedOptimizer, StepMethod
from .update_rule import UpdateRule

# -- step -------------------------------------------------------------------------------------------


_HALF = (
    "the optimizer has already changed parameters in the backward pass (zero_optimization.step_in_backward)"
)


def accumulates(steps: object) -> OptimizerError:
    """Return the error for a step of so many micro-batches."""
    return OptimizerError(
        f"zero_optimization.step_in_backward does not support {steps} micro-batches per step: each backward "
        "pass is a step. Use a larger micro-batch or remove the key"
    )


class BackwardStep(StepMethod):
    """Steps units when their gradients arrive.

    Attributes
        is_changed: a unit is about to be stepped, or has been, and ``engine.step()`` has not ended yet.
        has_gradients: a backward pass has ended since the last step.
        clips_units: there is no norm of an earlier step, so each unit is clipped by its own, for which all
            ranks add up a number.
    """

    steps_on_device = False

    def __init__(self, units: Sequence[Unit], comm: Comm, clip: float, *, by_value: bool) -> None:
        """Prepare to step ``units``, which may be replaced. ``clip``: the largest norm, or with ``by_value``
        the largest absolute value, of a gradient; 0 for any.
        """
        self.units = units
        self.comm = comm
        self._clip = clip
        self._by_value = by_value
        self.is_changed = self.has_gradients = self.clips_units = False
        self._in_step = False
        self._squares: list[Tensor] = []
        self._waiting: list[Unit] = []
        """Lists units whose step is left to the end: this rank lacks a gradient of theirs."""
        self._slices: dict[int, list[ShardSlice]] = {}
        """Maps the identity of a unit to its slices."""
        self._divisor = 1.0
        self._taken: list[dict[str, Any]] = []
        """Keeps the hyper-parameters of this pass."""

        self._was_changed = False
        self._restored_norm: float | None = None

    def connect(
        self,
        optimizer: ShardedOptimizer,
        divisor: WeakMethod[Callable[[], float | Tensor]],
        norm: WeakMethod[Callable[[], float | None]],
    ) -> None:
        self._optimizer = optimizer
        self._divisor_now = divisor
        self._norm = norm
        self._rule = UpdateRule(optimizer.optimizer)

    @property
    def previous_norm(self) -> float | None:
        """Return the norm of the last step's gradient, or of the checkpoint's; None before the first step."""
        last = self._norm()
        norm = None if last is None else last()
        return self._restored_norm if norm is None else norm

    # -- a backward pass

    @property
    def wants_each_sum(self) -> bool:  # type: ignore[override]  # it changes from pass to pass
        """Tell whether each unit is clipped by its own norm, for which all ranks add up a number."""
        return self.clips_units

    def before_pass(self, reducer: GradientReducer) -> None:
        """Begin a pass, with the hyper-parameters of now. Raises OptimizerError for a second pass."""
        if not self.has_gradients:
            self.check_unchanged()
        else:
            if not reducer.is_empty_pass:
                raise OptimizerError(
                    "second backward pass before engine.step(): zero_optimization.step_in_backward allows "
                    "one per step. If another model's loss runs through this model, freeze this model "
                    "during that pass (requires_grad_(False)) or detach its inputs"
                )
            reducer.clear()  # zeros: the pass reached no parameter, such as one of a model that was frozen
        # Units are stepped from their masters in this pass: what the script has written to the parameters
        # has to be in them before.
        for unit in self.units:
            if not unit.shard_params:
                unit.wait_unsharded()
                unit.writes.sync_to_masters()
        divisor = self._divisor_now()
        assert divisor is not None
        self._divisor = float(divisor())
        # The norm of this pass is known at its end, when most units have been stepped: the one of the step
        # before stands for it.
        norm = self.previous_norm
        coefficient = 1.0
        by_norm = self._clip > 0 and not self._by_value
        self.clips_units = by_norm and norm is None
        if by_norm and norm is not None and norm > self._clip:
            coefficient = self._clip / (norm + 1e-6)
        self._optimizer.take_hyperparameters()
        self._taken = self._hyperparameters()
        self._rule.begin(self._divisor / coefficient if coefficient else math.inf)
        self._slices = {}
        for part in self._optimizer.slices:
            self._slices.setdefault(id(part.unit), []).append(part)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Return what the groups have besides parameters, tensors as numbers."""
        return [
            {
                key: value.tolist() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.optimizer.param_groups
        ]

    def before_another_gradient(self, unit: Unit) -> None:
        """Raise OptimizerError: the unit has been stepped."""
        raise OptimizerError(
            f"{unit.name} got another gradient after its step in this backward pass: several reentrant "
            "checkpoints use its parameters. Set use_reentrant=False or remove "
            "zero_optimization.step_in_backward. Parameters have changed: load the last checkpoint"
        )

    def before_reduction(self, bucket: Bucket) -> None:
        """Note that a unit will be stepped when its gradient has been reduced, which begins now."""
        if not bucket.is_complete:
            return
        unit = bucket.unit
        self.is_changed = True
        # Not when the sum is there: see Note [Why a unit may change].
        unit.stepped()
        unit.writes.step_ahead()
        if unit.shard_params:
            unit.updated = _NotInThisPass(self, unit)

    def take(self, bucket: Bucket) -> None:
        """Step a unit that every gradient of this rank has reached. Others wait for :meth:`start`, when the
        ranks have found out which parameters had no gradient on any of them.
        """
        unit = bucket.unit
        store = unit.store
        assert store is not None and store.on_device
        with torch.no_grad():
            squares = store.grad_squares()
            square = torch.stack(squares).sum() / unit.copies if squares else self._nothing()
            self._squares.append(square)
            if self.clips_units:
                total = self.comm.all_reduce_scalars(square.reshape(1).clone(), f"clips {unit.name}")
                factor = (self._clip / (total.sqrt() / self._divisor + 1e-6)).clamp_(max=1.0)
                store.grad().mul_(factor.to(store.grad().dtype))
            elif self._clip > 0 and self._by_value:
                limit = self._clip * self._divisor
                store.grad().clamp_(-limit, limit)
            if bucket.is_complete:
                self._step(unit, self._slices.get(id(unit), []))
            else:
                self._waiting.append(unit)

    def _nothing(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.comm.device)

    def _step(self, unit: Unit, slices: Sequence[ShardSlice]) -> None:
        """Step slices of a unit, and release its gradient."""
        store = unit.store
        assert store is not None and store.on_device
        narrow = store.compute_copy
        updates = []
        for part in slices:
            assert part.leaf is not None
            out = None if narrow is None else part.of(narrow)
            updates.append(SliceUpdate(part.group, part.leaf, part.of(store.grad()), out, part.place))
        with named(f"step {unit.name}"):
            self._rule.apply(updates, self._optimizer.optimizer.state)
        store.publish(copy_is_new=True)
        store.drop_grad()
        store.grad_memory = None  # a store keeps it for the next step; here it is what shall be saved

    def end_pass(self) -> None:
        """End a pass: all gradients have arrived."""
        self.has_gradients = True

    # -- what may come between

    def check_unchanged(self) -> None:
        """Raise OptimizerError if a step is half done, and nothing but its end may follow."""
        if not self.is_changed:
            return
        if not self.has_gradients:
            raise OptimizerError(
                f"the last backward pass raised an exception midway, and {_HALF}: load the last checkpoint"
            )
        raise OptimizerError(
            f"{_HALF}, but engine.step() has not completed since: call it right after the backward pass; if "
            "it raised an error, load the last checkpoint"
        )

    def keeps_gradients(self) -> bool:
        """Tell whether an error, such as a hook's, is just ending the step, which stays half done."""
        if not (self._in_step and self.is_changed and sys.exc_info()[0] is not None):
            return False
        self._in_step = False
        return True

    def check_droppable(self) -> None:
        """Raise OptimizerError if gradients have been used that are to be dropped."""
        if not self.is_changed:
            return
        if self._in_step:
            raise OptimizerError(
                f"gradients are not finite, and {_HALF}: load the last checkpoint. To continue in this "
                'case, set "bf16": {"check_grad_overflow": false}'
            )
        raise OptimizerError(
            f"cannot drop gradients: {_HALF}. Call engine.step(); call zero_grad() only before the backward "
            "pass"
        )

    def drop_gradients(self) -> None:
        """Begin a new step."""
        self.is_changed = self.has_gradients = self._in_step = False
        self._squares.clear()
        self._waiting.clear()

    # -- the end of a step

    def takes(self, unit: Unit) -> bool:
        """Tell whether this object steps a unit: it does."""
        return True

    def own_squares(self) -> list[Tensor]:
        """Return the sums of squares of this pass's gradients before they were clipped."""
        self._in_step = True
        return list(self._squares)

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Step the units that have waited, by the hyper-parameters of this pass. Raises OptimizerError where
        the script has changed them since it began.
        """
        for index, (now, before) in enumerate(zip(self._hyperparameters(), self._taken, strict=False)):
            changed = [key for key, value in before.items() if now.get(key) != value]
            if changed:
                raise OptimizerError(
                    f"{changed[0]} of parameter group {index} was changed after backward() started, but "
                    "zero_optimization.step_in_backward steps with the earlier value: change it before "
                    "backward(), or remove the key"
                )
        with torch.no_grad():
            for unit in self._waiting:
                self._step(unit, [part for part in slices if part.unit is unit and part.used])
        self._rule.end()
        self.is_changed = False

    def check(self) -> None:
        """Raise what ended a step half-way; inside a backward pass nothing has ended."""
        if not placeholder.in_backward():
            self.check_unchanged()

    # -- the engine's calls

    def check_accumulation(self, steps: object) -> None:
        if steps != 1:
            raise accumulates(steps)

    def before_forward(self) -> None:
        self.check()

    def before_backward(self, *, retain_graph: bool) -> None:
        if retain_graph:
            raise OptimizerError(
                "zero_optimization.step_in_backward does not support backward(retain_graph=True): the "
                "backward pass updates parameters that the graph still needs"
            )

    def before_step(self) -> None:
        if not self.has_gradients:
            self.check_unchanged()

    def before_save(self) -> None:
        self.check()

    def begin_load(self) -> None:
        self._was_changed = self.is_changed
        self.is_changed = False

    def end_load(self, *, has_loaded: bool) -> None:
        if not has_loaded:
            self.is_changed = self._was_changed

    def counters(self) -> dict[str, Any]:
        return {"previous_norm": self.previous_norm}

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Take the norm that the next step is clipped by."""
        self._restored_norm = counters.get("previous_norm")


class _NotInThisPass(Pending):
    """Refuses that a unit is gathered in the backward pass that has stepped it."""

    def __init__(self, step: BackwardStep, unit: Unit) -> None:
        self._step = weakref.ref(step)
        self._name = unit.name

    @property
    def refuses(self) -> bool:
        step = self._step()
        return step is not None and step.is_changed and not step.has_gradients

    def wait(self) -> None:
        if self.refuses and placeholder.in_backward():
            raise OptimizerError(
                f"{self._name} is used again after its step in the same backward pass, and {_HALF}: remove "
                "step_in_backward for this model and load the last checkpoint"
            )


def check_step(unit: Unit) -> None:
    """Raise OptimizerError where a unit has been stepped in a backward pass that ``engine.step()`` has not
    ended: some values of the model are new then, and others not.
    """
    if unit.gradients is not None and isinstance(unit.gradients.consumer, BackwardStep):
        unit.gradients.consumer.check()
