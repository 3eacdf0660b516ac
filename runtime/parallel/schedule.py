"""Divides a model's layers over the stages of a pipeline, and trains whole steps on them (`stages.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.axis import PASSES, Axis
from ..comm.collectives import Comm
from ..comm.shard_spec import spec_of
from ..config import Config
from ..engine import (
    Engine,
    LossFunction,
    WeightedLoss,
    WholeSteps,
    loss_in,
    sum_losses,
    to_device,
    without_empty,
)
from ..errors import ParameterError, RankMismatchError
from ..fingerprint import fingerprint
from ..log import detail
from ..zero import placeholder
from ..zero.hooks import zero_without
from ..zero.tensors import tensors_in
from ..zero.unit import Unit
from .checks import both_ways, differ
from .pipeline import (
    BATCH,
    ROUTERS,
    LayerForward,
    LayerSequence,
    NonLayerForward,
    Passes,
    divide,
    find_layers,
    keep_local_layers,
    sum_tied,
    weights_of,
)

if TYPE_CHECKING:
    from .stages import Stages

# -- engine -----------------------------------------------------------------------------------------


class StagedModel:
    """Holds the parts of an engine's pipeline."""

    def __init__(
        self, sequence: LayerSequence, axis: Axis, tied: Sequence[nn.Parameter], schedule: str, passes: Passes
    ) -> None:
        self.sequence = sequence
        self.axis = axis
        self.tied = tied
        self.schedule = schedule
        self.passes = passes
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
            spec: Any = spec_of(parameter)  # all of a pipeline have one
            sum_tied(total, self.axis, spec.owners)
            add(unit, unit.index_of[id(parameter)], total)


class PipelineSchedule(WholeSteps):
    """Trains and evaluates whole steps of an engine whose ranks have different layers of the model.

    Make it after all changes of forwards.
    """

    def __init__(self, engine: Engine, pipeline: StagedModel) -> None:
        super().__init__(engine)
        self._pipeline = pipeline
        self._losses: list[WeightedLoss] = []
        """Collects the losses of a step or an evaluation on the last stage."""
        self._is_running = False
        """Tells that a step or an evaluation is running, whose calls of the engine are allowed."""
        engine._sharded.replace_gradient = pipeline.collect
        from .stages import Stages  # not above: runs without a pipeline would wait for the import

        pipeline.stages = Stages(
            pipeline.sequence,
            pipeline.passes,
            pipeline.axis,
            pipeline.schedule,
            self._call_model,
            self._before_backward,
        )

    def _before_backward(self, is_last: bool) -> None:
        """Prepare a backward pass. In the last one of a step, each layer is reduced when its gradient is
        complete, while layers before it are still computed.

        Not in the first step: all ranks agree on the order of reductions after it, and those of earlier
        stages still wait for this one's gradients here. And not where stages share parameters, whose
        gradients are summed after all passes.
        """
        engine = self._engine
        # Passes of several micro-batches are under way; hooks of each output know its tokens.
        engine._sharded.loss_scaling.expect_scaled(None)
        engine._reducer.sync = is_last and engine._reducer.has_order and not self._pipeline.tied

    def check_call(self, what: str) -> None:
        """Raise ParameterError for a call of the script's: a rank has some of the layers."""
        if not self._is_running:
            raise ParameterError(
                f"pipeline parallelism: {what} is not supported, because ranks hold different layers: call "
                "engine.train_batch(data_iter) for a step, engine.eval_batch(data_iter) for an evaluation"
            )

    def check_passes(self) -> None:
        """Raise ParameterError if an earlier pass has ended in an exception on this stage."""
        if self._pipeline.stages is not None and not self._is_running:
            self._pipeline.stages.check()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def train(self, data_iter: Iterator[Any] | None, loss_fn: LossFunction | None) -> Tensor:
        """Train a step on the same micro-batches on all ranks; see :meth:`Engine.train_batch`."""
        engine = self._engine
        engine._guard("engine.train_batch()")
        engine.checkpoints.check()
        micro_batches = self._take(data_iter, loss_fn, engine.gradient_accumulation_steps())
        stages = self._pipeline.stages
        pipeline = self._pipeline
        assert stages is not None
        self._take_unfrozen()
        engine.module.train()
        engine._reducer.sync = False
        with self._running(), engine._around("forward", (), {}), self._errors():
            stages.train(micro_batches, self._key(micro_batches))
        if not engine._reducer.passes:
            engine._reducer.begin()
            engine._reducer.finish()
        pipeline.sum_tied(engine._reducer.add)
        mean, weight = self._mean(len(micro_batches))
        engine._note_loss(mean, 0, tokens=weight if engine.averaging.by_tokens else None)
        engine.micro_steps += len(micro_batches) - 1
        engine.accumulated += len(micro_batches) - 1
        with self._running():
            engine.step()
        return mean

    def _take_unfrozen(self) -> None:
        """Take what has been unfrozen on all stages at once: in the passes, a stage waits for the one before,
        and a trial pass would take new units for values of other stages. Collective.
        """
        self._engine.handles.take_unfrozen()

    def _evaluate(self, micro_batches: list[Any]) -> Tensor:
        stages = self._pipeline.stages
        assert stages is not None
        self._take_unfrozen()
        with self._running(), self._errors():
            stages.evaluate(micro_batches, self._key(micro_batches))
        return self._mean(len(micro_batches))[0]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Leave a pass that ended in an exception, and raise that, not what torch's schedules make of it."""
        engine = self._engine
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
        loss_fn: LossFunction | None,
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
        found = axis.max(torch.cat([is_short, both_ways(fingerprint(micro_batches, device))]), BATCH)
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
            self._pipeline.sequence.loss_fn = loss_fn
        return micro_batches

    def _key(self, micro_batches: Sequence[Any]) -> Any:
        shapes = [tuple(tuple(t.shape) for t in tensors_in(each)) for each in micro_batches]
        if any(shape != shapes[0] for shape in shapes):
            raise ParameterError(
                "pipeline parallelism: the micro-batches of a step must have one shape, got "
                f"{sorted(set(shapes))} (dataloader_drop_last drops a smaller last one)"
            )
        return (self._pipeline.sequence.model.training, shapes[0])

    def _call_model(self, micro_batch: Any, wants_loss: bool) -> Any:
        """Call the model with a micro-batch; return the scaled loss while it trains, else the plain one."""
        engine = self._engine
        tokens = None
        if isinstance(micro_batch, Mapping):
            micro_batch = dict(micro_batch)
            tokens = self.take_tokens(micro_batch)
        output, labels = self._output_of(micro_batch, wants_loss)
        if not wants_loss:
            return None
        loss, tokens = self.weighted(self._loss_of(output, labels), tokens)
        if tokens is not None:
            loss = without_empty(loss, tokens)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    hook = partial(zero_without, tokens)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._losses.append((loss.detach(), tokens))
        if not torch.is_grad_enabled():
            return loss
        return engine._scaled(loss, divide=True, tokens=tokens)

    def _output_of(self, micro_batch: Any, wants_loss: bool) -> tuple[Any, Any]:
        forward = self._engine.forward
        device = self._pipeline.axis.comm.device
        if isinstance(micro_batch, Mapping):
            given = {name: to_device(value, device) for name, value in micro_batch.items()}
            if given.get("output_router_logits"):
                raise ParameterError(ROUTERS)
            labels = None
            if not wants_loss or self._pipeline.sequence.loss_fn is not None:
                labels = given.pop("labels", None)
            return forward(**given), labels
        inputs, labels = micro_batch
        args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return forward(*(to_device(each, device) for each in args)), to_device(labels, device)

    def _loss_of(self, output: Any, labels: Any) -> Any:
        """Return what the script's loss_fn does, or else the model's own loss."""
        loss_fn = self._pipeline.sequence.loss_fn
        if loss_fn is not None:
            return loss_fn(output, labels) if labels is not None else loss_fn(output)
        return loss_in(output)

    def _mean(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the last ``count`` micro-batches over the ranks of the last stage, and the
        weight that each rank of a pipeline gives it in a sum over all ranks. Collective.
        """
        comm = self._pipeline.axis.comm
        # a trial pass, which finds the shapes of what stages send, may have computed a loss before them
        total = sum_losses(self._losses[-count:], comm.device)
        self._losses.clear()
        comm.all_reduce_scalars(total, "sums the losses")
        wide = any(p.dtype == torch.float64 for p in self._pipeline.sequence.model.parameters())
        mean = (total[0] / total[1]).to(torch.float64 if wide else torch.float32)
        return mean, total[1] * comm.mesh.pipeline / comm.world_size


# -- apply ------------------------------------------------------------------------------------------
#
# Divides a model's layers over the ranks of a pipeline.


_LEAST_TORCH = (2, 11)


def divide_layers(model: nn.Module, config: Config, comm: Comm) -> StagedModel | None:
    """Leave this rank the parameters of its layers, if ranks have different ones; return the pipeline.

    Values are rank 0's already. Collective. Raises ParameterError for a model that cannot be divided, or has
    been.
    """
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), (LayerForward, NonLayerForward)):
            raise ParameterError(
                f"{name} holds only this rank's pipeline stage, from an earlier engine: rebuild the model "
                "and load a checkpoint or the state_dict"
            )
    if comm.mesh.pipeline == 1:
        return None
    section = config.pipeline
    stages = comm.mesh.pipeline
    problem = None
    sequence = None
    try:
        _check_torch()
        name, layers = find_layers(model)
        sequence = LayerSequence(model, name, layers, stages, loss_fn=getattr(model, "loss_fn", None))
        parts = stages * (section.virtual_stages if section.schedule == "interleaved" else 1)
        sequence.bounds = divide(weights_of(model, layers), parts, section.partition)
    except ParameterError as error:
        problem = str(error)
    for rank, said in enumerate(comm.exchange(problem)):
        if said is not None:
            raise ParameterError(said if said == problem else f"on rank {rank}: {said}")
    assert sequence is not None
    axis = Axis(comm, "pipeline")
    axis.make_group(PASSES)
    tied = keep_local_layers(sequence, axis)
    if comm.rank == 0:
        sizes = ", ".join(str(b - a) for a, b in pairwise(sequence.bounds))
        detail(f"pipeline parallelism: {stages} stages, {section.schedule}; layers per part: {sizes}")
    return StagedModel(sequence, axis, tied, section.schedule, Passes(sequence))


def _check_torch() -> None:
    """Raise ParameterError for a torch whose schedules are not known to work: 2.6's hang over gloo."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _LEAST_TORCH:
        raise ParameterError(
            f"pipeline parallelism needs torch {_LEAST_TORCH[0]}.{_LEAST_TORCH[1]} or later, not "
            f"{torch.__version__}: schedules of older versions hang or are untested"
        )
