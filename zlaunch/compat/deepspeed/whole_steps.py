"""What DeepSpeed's engine of a PipelineModule has: whole steps, and a rank's place in the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.pipeline_parallel.whole_steps import NO_DATA, WholeSteps


class StageMembers:
    """Has what an engine of any number of stages has, beside its steps."""

    _iterator: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        engine: Any = self
        return int(engine._sharded.comm.mesh.pipeline)

    @property
    def stage_id(self) -> int:
        """Return the stage that this rank has."""
        comm = self._comm
        return int(comm.mesh.coordinates(comm.rank).get("pipeline", 0))

    @property
    def _comm(self) -> Any:
        engine: Any = self
        return engine._sharded.comm

    def get_pipeline_parallel_rank(self) -> int:
        """Return the stage that this rank has."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Tell whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Tell whether this rank has the last layers."""
        return self.stage_id == self.num_stages - 1

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set what :meth:`train_batch` takes micro-batches from."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set what :meth:`train_batch` takes micro-batches from, once through."""
        self._iterator = iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set what makes the pair of inputs and labels of what the data has."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: each step may have micro-batches of another shape."""

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a loader of this rank's share, in its order."""
        engine: Any = super()
        if len(args) < 2:
            kwargs.setdefault("route", "eval")
        return engine.deepspeed_io(dataset, *args, **kwargs)

    def _micro_batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Return what was given, else what is set, else the training data again and again.

        Raises ParameterError where there is none.
        """
        engine: Any = self
        if data_iter is None and self._iterator is None:
            if engine.training_dataloader is None:
                raise ParameterError(NO_DATA)
            self._iterator = _Endless(engine.training_dataloader)
        found: Any = data_iter if data_iter is not None else self._iterator
        return found if self._batch_fn is None else map(self._batch_fn, found)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and go on with the training data where the checkpoint was written."""
        engine: Any = super()
        found = engine.load_checkpoint(*args, **kwargs)
        if isinstance(self._iterator, _Endless):
            self._iterator = None
        return found


class _Endless(Iterator[Any]):
    """Goes through a loader again and again."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._present = loader, iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self._present)
        except StopIteration:
            self._present = iter(self._loader)
            return next(self._present)


def _refuse(return_logits: bool, compute_loss: bool, reduce_output: str | None) -> None:
    """Raise NotInZlaunch for what eval_batch does not return."""
    asked = {
        "return_logits=True": return_logits,
        "compute_loss=False": not compute_loss,
        f"reduce_output={reduce_output!r}": reduce_output != "avg",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotInZlaunch(
                f"engine.eval_batch({name}) is not supported: it returns only the mean loss; store "
                "other values in the model's loss_fn, on the last stage"
            )


class SeveralStages(StageMembers):
    """Gives the runtime's methods of a pipeline DeepSpeed's arguments."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train a step; return the mean loss."""
        pipeline: Any = super()
        self._iterator = data_iter or self._iterator
        loss: Tensor = pipeline.train_batch(self._micro_batches(None))
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of so many micro-batches, on all ranks."""
        _refuse(return_logits, compute_loss, reduce_output)
        pipeline: Any = super()
        found = self._micro_batches(data_iter)
        loss: Tensor = pipeline.eval_batch(found, num_micro_batches=num_micro_batches)
        return loss


class OneStage(StageMembers, WholeSteps):
    """Trains and evaluates whole steps on ranks that have all layers."""

    over_pipeline = SeveralStages
    """Comes before the pipeline's methods where there are several stages."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]  # DeepSpeed's
        """Train a step on ``gradient_accumulation_steps`` micro-batches, pairs of inputs and labels, of
        ``data_iter``, by default the last one; return the mean loss over all ranks. Raises StopIteration at
        the end of the data.
        """
        self._iterator = data_iter or self._iterator
        return super().train_batch(self._micro_batches(None))

    def eval_batch(  # type: ignore[override]  # DeepSpeed's arguments
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of so many micro-batches, by default as many as a step has."""
        _refuse(return_logits, compute_loss, reduce_output)
        found = self._micro_batches(data_iter)
        return super().eval_batch(found, num_micro_batches=num_micro_batches)
