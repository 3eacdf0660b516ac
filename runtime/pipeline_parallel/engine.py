"""Defines what an engine does whose ranks have different layers: whole steps alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..engine import Engine
from ..errors import ParameterError, RankMismatchError
from ..same_batch import both_ways, differ, fingerprint
from ..zero import placeholder
from ..zero.output_tensors import tensors_in
from ..zero.unit import Unit
from .cut import StageAxis
from .line import ROUTERS, Line
from .passing import Passes, install
from .stages import Stages
from .whole_steps import WholeSteps, loss_in, to_device, with_whole_steps

E = TypeVar("E", bound=Engine)


class StagedModel:
    """Holds the parts of an engine's pipeline."""

    def __init__(
        self, line: Line, axis: StageAxis, tied: Sequence[nn.Parameter], schedule: str, passes: Passes
    ) -> None:
        self.line, self.axis, self.tied, self.schedule, self.passes = line, axis, tied, schedule, passes
        self.stages: Stages | None = None
        self.collected: dict[int, Tensor] = {}
        ranks = ", ".join(map(str, axis.ranks))
        self.other_batch = (
            f"ranks {ranks} are stages of one pipeline but got different batches: pass the same batches on "
            "each rank. Use a DistributedSampler with num_replicas=engine.data_parallel_size and "
            "rank=engine.data_parallel_rank"
        )
        self._tied = {id(parameter) for parameter in tied}

    def collect(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Put the gradient of a parameter that several stages have aside, to be summed over them after all
        passes, and return zeros in its place; return others as they are.
        """
        if id(parameter) not in self._tied:
            return gradient
        wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
        known = self.collected.get(id(parameter))
        self.collected[id(parameter)] = wide.clone() if known is None else known.add_(wide)
        return torch.zeros_like(gradient)

    def sum_tied(self, add: Callable[[Unit, int, Tensor], Any]) -> None:
        """Give the sums of the gradients of parameters that several stages have to ``add``. Collective."""
        for parameter in self.tied:
            if not parameter.requires_grad:
                continue
            unit: Any = placeholder.owner(parameter)
            total = self.collected.pop(id(parameter), None)
            if total is None:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                total = torch.zeros(placeholder.shape_of(parameter), dtype=wide, device=self.axis.comm.device)
            cut: Any = parameter.zlaunch_cut  # type: ignore[attr-defined]  # all of a pipeline have one
            self.axis.sum_tied(total, cut.owners)
            add(unit, unit.index_of[id(parameter)], total)


class Pipelined(WholeSteps):
    """Is an engine whose ranks have different layers of the model: it trains and evaluates whole steps."""

    _pipeline: StagedModel

    def start_pipeline(self, pipeline: StagedModel) -> None:
        """Take the pipeline's parts; called once."""
        self._pipeline = pipeline
        engine: Any = self
        engine._sharded.replace_gradient = pipeline.collect
        pipeline.stages = Stages(
            pipeline.line,
            pipeline.passes,
            pipeline.axis,
            pipeline.schedule,
            self._call_model,
            lambda: setattr(engine._sharded.loss_scaling, "loss_is_scaled", True),
        )

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ParameterError: a rank has some of the layers."""
        self._refuse("engine(...)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ParameterError: passes run in the order of the schedule."""
        self._refuse("engine.backward()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ParameterError: train_batch makes the step."""
        self._refuse("engine.step()")

    def _refuse(self, what: str) -> NoReturn:
        raise ParameterError(
            f"pipeline parallelism: {what} is not supported, because ranks hold different layers: call "
            "engine.train_batch(data_iter) for a step, engine.eval_batch(data_iter) for an evaluation"
        )

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, loss_fn: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Train one step on ``gradient_accumulation_steps`` micro-batches of ``data_iter``, by default of the
        training_data; return the mean loss over all ranks and micro-batches.

        All ranks call it with the same micro-batches. One is a dict of the model's arguments (a Hugging Face
        model, whose output has the loss) or a pair of inputs and labels, for which ``loss_fn(output,
        labels)`` computes the loss. Collective. Raises StopIteration at the end of the data, and
        ParameterError for a micro-batch or a model that does not fit.
        """
        engine: Any = self
        engine._check_alive()
        engine._states.check("engine.train_batch()")
        engine.checkpoints.check()
        micro_batches = self._take(data_iter, loss_fn, engine.gradient_accumulation_steps())
        stages, pipeline = self._pipeline.stages, self._pipeline
        assert stages is not None
        self._take_unfrozen()
        engine.module.train()
        engine._reducer.sync = False
        with engine._around("forward", (), {}), self._errors():
            scaled = stages.train(micro_batches, self._key(micro_batches))
        if not engine._reducer.passes:
            engine._reducer.begin()
            engine._reducer.finish()
        pipeline.sum_tied(engine._reducer.add)
        factor = engine._scaler.factor if engine._scaler.used else 1.0
        sums = torch.stack([loss.detach().sum() for loss in scaled]).sum() / factor if scaled else None
        mean = self._mean(sums)
        engine._note_loss(mean, 0)
        engine.micro_steps += len(micro_batches) - 1
        engine.accumulated += len(micro_batches) - 1
        super().step()  # type: ignore[misc]  # of the engine that this is mixed into
        return mean

    eval_batch = WholeSteps.eval_batch  # before those that a kind of engine has with other arguments

    def _take_unfrozen(self) -> None:
        """Take what has been unfrozen on all stages at once: in the passes, a stage waits for the one before,
        and a trial pass would take new units for values of other stages. Collective.
        """
        engine: Any = self
        engine.handles.take_unfrozen()

    def _evaluate(self, micro_batches: list[Any]) -> Tensor:
        stages = self._pipeline.stages
        assert stages is not None
        self._take_unfrozen()
        with self._errors():
            losses = stages.evaluate(micro_batches, self._key(micro_batches))
        sums = torch.stack([loss.sum() for loss in losses]).sum() / len(micro_batches) if losses else None
        return self._mean(sums)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Leave a pass that ended in an exception, and raise that, not what torch's schedules make of it."""
        engine: Any = self
        try:
            yield
        except RuntimeError as error:
            engine._sharded.abandon_forward()
            if type(error) is RuntimeError and error.__cause__ is not None and "failed to run" in str(error):
                raise error.__cause__  # noqa: B904 - it has its own cause
            raise
        except BaseException:
            engine._sharded.abandon_forward()
            raise

    def _take(
        self,
        data_iter: Iterator[Any] | None,
        loss_fn: Callable[..., Tensor] | None,
        count: int,
    ) -> list[Any]:
        stages = self._pipeline.stages
        assert stages is not None
        stages.check()
        micro_batches = self._next_ones(data_iter, count)
        axis = self._pipeline.axis
        device = axis.comm.device
        # fingerprints of the batches travel with the number that all stages wait for in any case
        is_short = torch.full((1,), int(len(micro_batches) < count), dtype=torch.int64, device=device)
        found = axis.largest(torch.cat([is_short, both_ways(fingerprint(micro_batches, device))]))
        ends, differs = torch.stack([found[0] > 0, differ(found[1:])]).tolist()
        if ends:
            raise StopIteration(
                f"data_iter ended after {len(micro_batches)} of {count} micro-batches, or on another stage"
            )
        for each in micro_batches:
            if not isinstance(each, Mapping) and not (isinstance(each, (tuple, list)) and len(each) == 2):
                raise ParameterError(
                    "pipeline parallelism: expected a micro-batch that is a dict of the model's arguments "
                    f"or a pair of inputs and labels, got {type(each).__name__}"
                )
        if differs:
            raise RankMismatchError(self._pipeline.other_batch)
        if loss_fn is not None:
            self._pipeline.line.loss_fn = loss_fn
        return micro_batches

    def _key(self, micro_batches: Sequence[Any]) -> Any:
        shapes = [tuple(tuple(t.shape) for t in tensors_in(each)) for each in micro_batches]
        if any(shape != shapes[0] for shape in shapes):
            raise ParameterError(
                "pipeline parallelism: the micro-batches of a step must have one shape, got "
                f"{sorted(set(shapes))} (dataloader_drop_last drops a smaller last one)"
            )
        return (self._pipeline.line.model.training, shapes[0])

    def _call_model(self, micro_batch: Any, wants_loss: bool) -> Any:
        """Call the model with a micro-batch; return the scaled loss while it trains, else the plain one."""
        engine: Any = self
        output, labels = self._output_of(micro_batch, wants_loss)
        if not wants_loss:
            return None
        loss = self._loss_of(output, labels)
        if not torch.is_grad_enabled():
            return loss
        return engine._scaled(loss, True)

    def _output_of(self, micro_batch: Any, wants_loss: bool) -> tuple[Any, Any]:
        forward: Any = super().forward  # type: ignore[misc]  # of the engine that this is mixed into
        device = self._pipeline.axis.comm.device
        if isinstance(micro_batch, Mapping):
            given = {name: to_device(value, device) for name, value in micro_batch.items()}
            if given.get("output_router_logits"):
                raise ParameterError(ROUTERS)
            labels = None
            if not wants_loss or self._pipeline.line.loss_fn is not None:
                labels = given.pop("labels", None)
            return forward(**given), labels
        inputs, labels = micro_batch
        args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return forward(*(to_device(each, device) for each in args)), to_device(labels, device)

    def _loss_of(self, output: Any, labels: Any) -> Tensor:
        loss_fn = self._pipeline.line.loss_fn
        if loss_fn is not None:
            loss: Tensor = loss_fn(output, labels) if labels is not None else loss_fn(output)
            return loss
        return loss_in(output)

    def _mean(self, own: Tensor | None) -> Tensor:
        """Return the mean over the ranks of the last stage of their losses. Collective."""
        comm = self._pipeline.axis.comm
        total = torch.zeros(2, dtype=torch.float64, device=comm.device)
        if own is not None:
            total += torch.stack([own.detach().double(), torch.ones_like(own, dtype=torch.float64)])
        comm.all_reduce_scalars(total, "sums the losses")
        wide = any(p.dtype == torch.float64 for p in self._pipeline.line.model.parameters())
        return (total[0] / total[1]).to(torch.float64 if wide else torch.float32)


def choose_kind(kind: type[E], pipeline: StagedModel | None, *, has_section: bool) -> type[E]:
    """Return the engine class that trains whole steps: that of a pipeline, or if the config ``has_section``
    on it, one of ranks that have all layers; else the same. Call it after all changes of forwards.

    ``kind`` may name a class whose methods come before those of the pipeline, as ``over_pipeline``.
    """
    if pipeline is None:
        return with_whole_steps(kind) if has_section else kind
    install(pipeline.line, pipeline.passes)
    over = getattr(kind, "over_pipeline", None)
    return type(f"Pipelined{kind.__name__}", (*([over] if over else []), Pipelined, kind), {})
