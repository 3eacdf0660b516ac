"""Orders of a pipeline's passes, as instructions."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.pipe_schedule import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    DataParallelSchedule,
    DualPipeVSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

__getattr__ = _absent("deepspeed.runtime.pipe.schedule")
