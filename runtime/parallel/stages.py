"""Runs micro-batches through the stages of a pipeline, in the order of a schedule of torch's.

Only a pipeline imports this module: torch's schedules take half a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ..comm.axis import Axis
from ..errors import ParameterError
from .pipeline import CHANNEL, ForeignValues, LayerSequence, PartPass, Passes, StateWatch, trying

Call = Callable[[Any, bool], Any]
"""Calls the model with a micro-batch, and tells it whether the loss is wanted; returns the loss then."""
_FIRST = 3
_EVERY = 50
"""Say in which steps it is watched what passes change."""
Meta = tuple[tuple[int, ...], torch.dtype]


class PartModule(nn.Module):
    """Computes one part of the pipeline for a micro-batch, which it finds by its number."""

    def __init__(self, part: int, sequence: LayerSequence, passes: Passes, axis: Axis, call: Call) -> None:
        super().__init__()
        self._part = part
        self._sequence = sequence
        self._passes = passes
        self._axis = axis
        self._call = call
        self.micro_batches: Sequence[Any] = ()
        self.foreign: ForeignValues | None = None
        """Follows other stages' values, in a trial pass."""
        self.meta: Meta | None = None
        """The shape and dtype of what the part hands on, once known."""

    @property
    def is_last(self) -> bool:
        """Tell whether the part computes the loss."""
        return bool(self._part == self._sequence.parts - 1)

    def forward(self, *received: Any, number: Tensor) -> Any:
        """Return what the next part gets, or the loss as (1,)."""
        sequence = self._sequence
        first = self._part == 0
        given = None if first else received[0]
        run = PartPass(
            sequence.bounds[self._part], sequence.bounds[self._part + 1], given, foreign=self.foreign
        )
        count = self._axis.comm._count
        self._passes.run = run
        try:
            found = self._call(self.micro_batches[int(number)], self.is_last)
        finally:
            self._passes.run = None
        if run.called != len(sequence.layers):
            raise ParameterError(
                f"pipeline parallelism: the model called {run.called} of {len(sequence.layers)} layers "
                f"({sequence.name})"
            )
        if given is not None and torch.is_grad_enabled():
            count(CHANNEL, given.numel())  # its gradient is sent back
        if self.is_last:
            run.check_own(found, "the loss")
            if found.numel() != 1:
                raise ParameterError(
                    f"pipeline parallelism: the loss must be a single number, got shape {list(found.shape)}"
                )
            return found.reshape(1).to(torch.float64, copy=True)  # of one dtype, whatever the model's is
        if not isinstance(run.captured, Tensor):
            raise ParameterError(
                f"pipeline parallelism: a stage sends one tensor, but layer {run.stop - 1} returns a "
                f"{type(run.captured).__name__}: join the tensors (torch.cat), recompute the others in the "
                "layers that need them, or choose other boundaries with pipeline.partition"
            )
        meta = tuple(run.captured.shape), run.captured.dtype
        if self.meta is not None and meta != self.meta:
            raise ParameterError(
                f"pipeline parallelism: layer {run.stop - 1} returns {list(meta[0])} in {meta[1]} for "
                f"micro-batch {int(number)}, but {list(self.meta[0])} in {self.meta[1]} for the first "
                "micro-batch with the same input shapes: these must match"
            )
        count(CHANNEL, run.captured.numel())
        # older torch detaches in place what was sent, which views do not allow
        return run.captured.clone() if run.captured._is_view() else run.captured


class Stages:
    """Holds this rank's parts of the pipeline, and runs their passes."""

    def __init__(
        self,
        sequence: LayerSequence,
        passes: Passes,
        axis: Axis,
        schedule: str,
        call: Call,
        before: Callable[[bool], None],
    ) -> None:
        """``call`` calls the model; ``before`` is called before each backward pass, with whether it is this
        rank's last one of a step.
        """
        self.sequence = sequence
        self.axis = axis
        self.schedule = schedule
        self._before = before
        own = range(axis.rank, sequence.parts, sequence.stages)
        self.modules = {part: PartModule(part, sequence, passes, axis, call) for part in own}
        self._metas: dict[Any, list[Meta]] = {}
        self._built: tuple[Any, Any] | None = None
        self._steps = 0
        self._backward_left = 0
        """Counts this rank's backward passes of a step that are still to come."""
        self._tried: set[bool] = set()
        """Holds in which modes, training or not, a trial pass has computed a loss."""
        self._is_under_way = False

    def check(self) -> None:
        """Raise ParameterError if earlier passes have ended in an exception here: the other stages still wait
        in them, where no watch sees them, and this one would wait for them.
        """
        if self._is_under_way:
            raise ParameterError(
                "pipeline parallelism: an earlier pass raised an exception on this stage, and the other "
                "stages still wait in it: let the exception end the process, so that the run can resume "
                "from its last checkpoint"
            )

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Run passes of all stages."""
        self._is_under_way = True
        yield
        self._is_under_way = False

    def train(self, micro_batches: Sequence[Any], key: Any) -> None:
        """Run forward and backward passes. ``key`` stands for the shapes of the micro-batches. Raises
        ParameterError if the schedule does not support their number.
        """
        count = len(micro_batches)
        if self.schedule == "interleaved" and count % self.sequence.stages:
            raise ParameterError(
                "pipeline.schedule: interleaved needs gradient_accumulation_steps to be a multiple of the "
                f"{self.sequence.stages} stages, got {count}"
            )
        with self._passes():
            self._train(micro_batches, key)

    def _train(self, micro_batches: Sequence[Any], key: Any) -> None:
        count = len(micro_batches)
        for module in self.modules.values():
            module.micro_batches = micro_batches
        metas = self._probe(key)
        self._expect(metas)
        if self._built is None or self._built[0] != (key, count):
            self._built = (key, count), self._build(metas, count)
        watch = StateWatch(self.sequence) if self._steps < _FIRST or self._steps % _EVERY == 0 else None
        self._steps += 1
        numbers = torch.arange(count)
        given = (numbers,) if 0 in self.modules else ()
        has_last = self.sequence.parts - 1 in self.modules
        rest = {"target": numbers} if has_last else {}
        self._backward_left = count * len(self.modules)
        self._built[1].step(*given, number=numbers, **rest)
        if watch is not None:
            watch.check()

    def _before_backward(self) -> None:
        self._backward_left -= 1
        self._before(not self._backward_left)

    def _expect(self, metas: Sequence[Meta]) -> None:
        """Note what each part has to hand on."""
        for part, module in self.modules.items():
            module.meta = None if module.is_last else metas[part]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any], key: Any) -> None:
        """Run forward passes."""
        with self._passes():
            self._evaluate(micro_batches, key)

    def _evaluate(self, micro_batches: Sequence[Any], key: Any) -> None:
        for module in self.modules.values():
            module.micro_batches = micro_batches
        metas = self._probe(key)
        self._expect(metas)
        for number in range(len(micro_batches)):
            for part in range(self.sequence.parts):
                if part not in self.modules:
                    continue
                module = self.modules[part]
                received = tuple[Tensor, ...]()
                if part and part - 1 not in self.modules:
                    shape, dtype = metas[part - 1]
                    buffer = torch.empty(shape, dtype=dtype, device=self.axis.comm.device)
                    dist.recv(
                        buffer, self.axis.ranks[(part - 1) % self.sequence.stages], group=self.axis.group
                    )
                    received = (buffer,)
                output = module(*received, number=torch.tensor(number))
                if not module.is_last:
                    dist.send(
                        output.contiguous(),
                        self.axis.ranks[(part + 1) % self.sequence.stages],
                        group=self.axis.group,
                    )

    def _probe(self, key: Any) -> list[Meta]:
        """Return the shape and dtype of what each part hands on. Collective."""
        if key in self._metas:
            return self._metas[key]
        metas: list[Meta] = []
        device = self.axis.comm.device
        is_training = self.sequence.model.training
        for part in range(self.sequence.parts - (is_training in self._tried)):
            found: list[Any] = [None]
            if part in self.modules:
                received = []
                if part:
                    shape, dtype = metas[-1]
                    received.append(torch.zeros(shape, dtype=dtype, device=device))
                found = [self._try(self.modules[part], received)]
            source = self.axis.ranks[part % self.sequence.stages]
            dist.broadcast_object_list(found, source, group=self.axis.group)
            if isinstance(found[0], str):
                raise ParameterError(found[0])
            metas.append(found[0])
        self._tried.add(is_training)
        self._metas[key] = metas
        return metas

    def _try(self, module: PartModule, received: Sequence[Tensor]) -> Meta | str:
        """Run a trial pass; return the shape and dtype of its output, or why the part cannot be computed."""
        device = self.axis.comm.device
        devices = [device] if device.type == "cuda" else []
        module.meta = None
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), trying(self.sequence) as module.foreign:
                output = module(*received, number=torch.tensor(0))
        except ParameterError as error:
            return str(error)
        finally:
            module.foreign = None
        return tuple(output.shape), output.dtype

    def _build(self, metas: list[Meta], count: int) -> Any:
        """Make torch's stages and schedule."""
        stages: list[Any] = []
        for part, module in self.modules.items():
            received = torch.empty(1, dtype=torch.int64, device="meta")
            if part:
                received = _meta(metas[part - 1])
            output = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
            if not module.is_last:
                output = _meta(metas[part])
            stages.append(
                _Stage(
                    module,
                    part,
                    self.sequence.parts,
                    self.axis.comm.device,
                    input_args=(received,),
                    output_args=(output,),
                    group=self.axis.group,
                )
            )
            stages[-1].before = self._before_backward
        options: dict[str, Any] = {"loss_fn": _the_loss}  # parameters have no grad that it could scale
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, **options)
        is_short = count < self.sequence.stages  # both then have all micro-batches on their way
        kind: Any = ScheduleGPipe if self.schedule == "gpipe" or is_short else Schedule1F1B
        return kind(stages[0], count, **options)


def _meta(meta: Meta) -> Tensor:
    shape, dtype = meta
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def _the_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


class _Stage(PipelineStage):
    """Tells the engine before each backward pass."""

    before: Callable[[], None]

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        return super().backward_maybe_with_nosync(*args, **kwargs)
