"""``deepspeed.runtime.pipe.schedule``: the order in which a stage of a pipeline works, as instructions.

zlaunch's own pipeline runs torch's schedules (``zlaunch.runtime.parallel.stages``) and takes no such
instructions: these are for scripts that simulate, draw or test an order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from zlaunch.compat.deepspeed.missing import missing_class

# -- instructions -----------------------------------------------------------------------------------


class PipeInstruction:
    """Is what a stage does in a step; keyword arguments become its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.name}({given})"


class OptimizerStep(PipeInstruction):
    """Steps the optimizer."""


class ReduceGrads(PipeInstruction):
    """Reduces gradients over the data-parallel ranks of a stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sums gradients of parameters that several stages have."""


class CommitP2P(PipeInstruction):
    """Starts the queued sends and receives, and waits for them."""


class BufferOpInstruction(PipeInstruction):
    """Works with the buffer of a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Loads a micro-batch."""


class ForwardPass(BufferOpInstruction):
    """Computes a micro-batch's forward pass."""


class BackwardPass(BufferOpInstruction):
    """Computes a micro-batch's backward pass."""


class SendActivation(BufferOpInstruction):
    """Sends outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receives inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Sends the inputs' gradients to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receives the outputs' gradients from the next stage."""


# -- schedules --------------------------------------------------------------------------------------


class PipeSchedule(ABC):
    """Yields lists of instructions, one for each step of a stage.

    Args:
        micro_batches: Their number in a batch.
        stages: The number of stages.
        stage_id: The stage whose instructions these are.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches a stage holds at a time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Return the stage whose instructions these are."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Tell whether it is the first stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Tell whether it is the last stage."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Return the buffer of a micro-batch: they are taken in turn."""
        if not self._valid_micro_batch(micro_batch_id):
            raise ValueError(f"micro-batch {micro_batch_id} is not one of {self.micro_batches}")
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class InferenceSchedule(PipeSchedule):
    """Runs forward passes alone."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step. Neighbours send and receive in opposite orders, so that no two
        wait for each other.
        """
        is_even = self.stage_id % 2 == 0
        for step in range(self.micro_batches + self.stages - 1):
            now = step - self.stage_id
            receiving = step % 2 if is_even else (step + 1) % 2
            instructions: list[PipeInstruction] = []
            if self._valid_micro_batch(now) and (self.is_first_stage or self.is_last_stage):
                instructions.append(LoadMicroBatch(receiving))
            exchanged: list[PipeInstruction] = []
            if self._valid_micro_batch(now - 1) and self._valid_stage(self.next_stage):
                exchanged.append(SendActivation(1 - receiving))
            if self._valid_micro_batch(now) and self._valid_stage(self.prev_stage):
                exchanged.append(RecvActivation(receiving))
            instructions += exchanged if is_even else reversed(exchanged)
            if self._valid_micro_batch(now):
                instructions.append(ForwardPass(receiving))
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Return 2: one is received while the other is sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """Runs one forward and one backward pass in turn (1F1B) and steps the optimizer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        total = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for step in range(total):
            now, is_forward = self._step_to_micro_batch(step)
            instructions = self._exchanged(before, now, is_forward=is_forward)
            if self._valid_micro_batch(now):
                buffer = self._buffer_idx(now)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    instructions.append(LoadMicroBatch(buffer))
                instructions.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == total - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = now
            yield instructions

    def _exchanged(self, before: int, now: int, *, is_forward: bool) -> list[PipeInstruction]:
        """Return the sends of the previous step's micro-batch and the receives of this step's."""
        has_before = self._valid_micro_batch(before)
        has_now = self._valid_micro_batch(now)
        found: list[PipeInstruction] = []
        if is_forward and self._valid_stage(self.prev_stage):
            if has_before:
                found.append(SendGrad(self._buffer_idx(before)))
            if has_now:
                found.append(RecvActivation(self._buffer_idx(now)))
        elif not is_forward and self._valid_stage(self.next_stage):
            if has_now:
                found.append(RecvGrad(self._buffer_idx(now)))
            if has_before:
                found.append(SendActivation(self._buffer_idx(before)))
        return found

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches wait for their backward pass at most; two at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch of a step, which may not exist, and whether its pass is a forward one.

        A stage and its neighbours alternate: where one computes forward, the others compute backward.
        """
        is_forward = step_id % 2 == self.stage_id % 2
        if is_forward:
            return (step_id - self.stage_id % 2) // 2 - self.stage_id // 2, True
        rank_from_the_end = self.stages - (self.stage_id + 1) // 2
        if step_id % 2 == 0:
            return step_id // 2 - rank_from_the_end, False
        return (step_id - 1) // 2 - self.stages + 1 + self.stage_id // 2, False


class DataParallelSchedule(PipeSchedule):
    """Runs one micro-batch after the other on one stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                instructions += [ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1


DualPipeVSchedule = missing_class(
    "runtime.pipe.schedule.DualPipeVSchedule",
    'pipeline.schedule of the config is "gpipe", "1f1b" or "interleaved"',
)
