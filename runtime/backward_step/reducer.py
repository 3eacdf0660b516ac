"""Hands each unit's gradient to the step as soon as it is reduced."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptimizerError
from ..zero.bucket import Bucket, BucketState
from ..zero.reduce import GradientReducer
from ..zero.unit import Unit
from .step import BackwardStep


class SteppingReducer(GradientReducer):
    """Reduces gradients, and has each unit stepped once its own is there."""

    step: BackwardStep

    def make_step(self, units: Sequence[Unit]) -> BackwardStep:
        """Return the object that steps ``units``, which may be replaced."""
        self.step = BackwardStep(units, self.comm)
        return self.step

    def begin(self) -> None:
        """Begin a backward pass. Raises OptimizerError for a second one in a step."""
        if not self.step.has_gradients:
            self.step.check_unchanged()
        else:
            if not self.is_empty_pass:
                raise OptimizerError(
                    "second backward pass before engine.step(): zero_optimization.step_in_backward allows "
                    "one per step. If another model's loss runs through this model, freeze this model "
                    "during that pass (requires_grad_(False)) or detach its inputs"
                )
            self.clear()  # zeros: the pass reached no parameter, such as one of a model that was frozen
        self.step.begin()
        super().begin()

    def _open(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.REDUCED:
            raise OptimizerError(
                f"{bucket.unit.name} got another gradient after its step in this backward pass: several "
                "reentrant checkpoints use its parameters. Set use_reentrant=False or remove "
                "zero_optimization.step_in_backward. Parameters have changed: load the last checkpoint"
            )
        super()._open(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if _is_complete(bucket):
            self.step.announce(bucket.unit)
        super()._launch(bucket)
        while self._in_flight and self.step.clips_units:
            self._retire()  # in the order of the launches, which is that of all ranks

    def arrived(self, bucket: Bucket) -> None:
        """Step a unit that every gradient of this rank has reached.

        Others wait for ``engine.step()``, where the ranks find out which parameters had no gradient on any of
        them.
        """
        self.step.take(bucket.unit, at_once=_is_complete(bucket))

    def finish(self) -> None:
        """End the backward pass."""
        super().finish()
        self.step.end_pass()

    def forget(self, unit: object, index: int) -> None:
        """Drop the gradient of one parameter. Raises OptimizerError where it may have been used."""
        self.step.check_droppable()
        super().forget(unit, index)

    def clear(self) -> None:
        """Begin a new optimizer step. Raises OptimizerError if the present one is half done."""
        if self.step.ends_in_error():
            return
        self.step.check_droppable()
        super().clear()
        self.step.reset()


def check_step(unit: Unit) -> None:
    """Raise OptimizerError where a unit has been stepped in a backward pass that ``engine.step()`` has not
    ended: some values of the model are new then, and others not.
    """
    if isinstance(unit.gradients, SteppingReducer):
        unit.gradients.step.check()


def _is_complete(bucket: Bucket) -> bool:
    """Tell whether every parameter that is stepped has had a gradient on this rank."""
    slots = bucket.unit.layout.slots
    return all(used or slot.group < 0 for used, slot in zip(bucket.used, slots, strict=True))
