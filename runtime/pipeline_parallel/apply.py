"""Divides a model's layers over the ranks of a pipeline."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from ..comm.collectives import Comm
from ..config import Config
from ..errors import ParameterError
from ..log import detail
from .cut import StageAxis, leave_own
from .engine import StagedModel
from .line import Line, divide, find_line, weights_of
from .passing import LayerForward, OutsideForward, Passes

_LEAST_TORCH = (2, 11)


def divide_layers(model: nn.Module, config: Config, comm: Comm) -> StagedModel | None:
    """Leave this rank the parameters of its layers, if ranks have different ones; return the pipeline.

    Values are rank 0's already. Collective. Raises ParameterError for a model that cannot be divided, or has
    been.
    """
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), (LayerForward, OutsideForward)):
            raise ParameterError(
                f"{name} holds only this rank's pipeline stage, from an earlier engine: rebuild the model "
                "and load a checkpoint or the state_dict"
            )
    if comm.mesh.pipeline == 1:
        return None
    section, stages, problem, line = config.pipeline, comm.mesh.pipeline, None, None
    try:
        _check_torch()
        name, layers = find_line(model)
        line = Line(model, name, layers, stages, loss_fn=getattr(model, "loss_fn", None))
        parts = stages * (section.virtual_stages if section.schedule == "interleaved" else 1)
        line.bounds = divide(weights_of(model, layers), parts, section.partition)
    except ParameterError as error:
        problem = str(error)
    for rank, said in enumerate(comm.exchange(problem)):
        if said is not None:
            raise ParameterError(said if said == problem else f"on rank {rank}: {said}")
    assert line is not None
    axis = StageAxis(comm)
    tied = leave_own(line, axis)
    if comm.rank == 0:
        sizes = ", ".join(str(b - a) for a, b in pairwise(line.bounds))
        detail(f"pipeline parallelism: {stages} stages, {section.schedule}; layers per part: {sizes}")
    return StagedModel(line, axis, tied, section.schedule, Passes(line))


def _check_torch() -> None:
    """Raise ParameterError for a torch whose schedules are not known to work: 2.6's hang over gloo."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _LEAST_TORCH:
        raise ParameterError(
            f"pipeline parallelism needs torch {_LEAST_TORCH[0]}.{_LEAST_TORCH[1]} or later, not "
            f"{torch.__version__}: schedules of older versions hang or are untested"
        )
