"""Describes what one rank has of a model whose layers, experts or stages several ranks share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..cut import box_shape
from ..errors import MemoryPlanError, ParameterError
from ..expert_parallel.axis import ExpertAxis
from ..pipeline_parallel.cut import owners_of
from ..pipeline_parallel.line import Line, divide, find_line, weights_of
from ..rank_mesh import MeshShape
from ..tensor_parallel.axis import TensorAxis
from ..tensor_parallel.decide import Decision
from ..tensor_parallel.plan import find_plan
from ..zero.unit_policy import plan_blocks
from .model_sizes import SHARDED, ModelSizes, described

Blocks = list[list[nn.Parameter]]


class _OneOfSeveral(TensorAxis):
    """Stands for the ranks that share each layer, where there is one alone: tensors have the sizes that they
    would have, and other values.
    """

    def sum(self, tensor: Tensor, use: Hashable = "passes") -> Tensor:
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.size, -1)


def of_one_rank(model: ModelSizes, mesh: MeshShape) -> ModelSizes:
    """Describe what the rank that has most has of a model: the parts of its layers and experts, and of a
    pipeline the heaviest stage. Raises MemoryPlanError for a model that cannot be divided so.
    """
    if mesh.tensor == mesh.expert == mesh.pipeline == 1:
        return model
    if model.build is None:
        return _of_numbers(model, mesh)
    build = model.build

    def shared() -> nn.Module:
        """Build what a pass runs: with whole experts, as many tokens go to which as to a rank's own ones."""
        made = build()
        _cut(made, mesh, with_experts=False)
        return made

    try:
        with torch.device("meta"):
            made = build()
        of_experts = _cut(made, mesh, with_experts=mesh.expert > 1)
        blocks = [[parameter for _, parameter in block.parameters] for block in plan_blocks(made, SHARDED)]
        if mesh.pipeline > 1:
            blocks = _heaviest_stage(made, blocks, mesh.pipeline)
    except ParameterError as error:
        raise MemoryPlanError(f"{model.name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise MemoryPlanError(f"{model.name} cannot be split: {described(error)}") from error
    trainable = [sum(p.numel() for p in block if p.requires_grad) for block in blocks]
    held = [parameter for block in blocks for parameter in block]
    return replace(
        model,
        blocks=tuple(trainable),
        frozen=sum(p.numel() for p in held) - sum(trainable),
        experts=sum(p.numel() for p in held if p.requires_grad and id(p) in of_experts),
        build=shared,
    )


def _cut(model: nn.Module, mesh: MeshShape, *, with_experts: bool) -> set[int]:
    """Leave a model the parts of rank 0, and let it compute with them where experts are whole; return the
    ids of the parameters of experts.
    """
    comm: Any = SimpleNamespace(mesh=mesh, rank=0, experts=with_experts)
    work = Decision(model, find_plan(model, None) if mesh.tensor > 1 else {}, _OneOfSeveral(comm))
    work.decide()
    if with_experts:
        work.decide_on_experts(ExpertAxis(comm), None)
    of_experts = {} if work.experts is None else work.experts.boxes
    boxes = {**work.boxes, **of_experts}
    for parameter in model.parameters():
        if id(parameter) in boxes:
            parameter.data = parameter.detach().new_empty(box_shape(boxes[id(parameter)][0]))
    if not with_experts:
        for name, forward in work.forwards.items():
            forward.name, work.modules[name].forward = name, forward
        for module, key, value in work.settings:
            setattr(module, key, value)
    return set(of_experts)


def _heaviest_stage(model: nn.Module, blocks: Blocks, stages: int) -> Blocks:
    """Return the blocks of the stage that has most."""
    name, layers = find_line(model)
    line = Line(model, name, layers, stages)
    line.bounds = divide(weights_of(model, layers), stages, "best")
    owners, found = owners_of(line), list[Blocks]()
    for stage in range(stages):
        root, *rest = ([p for p in block if stage in owners[id(p)]] for block in blocks)
        found.append([root, *filter(None, rest)])
    return max(found, key=lambda own: sum(p.numel() for block in own for p in block))


def _of_numbers(model: ModelSizes, mesh: MeshShape) -> ModelSizes:
    root, *layers = (-(-block // mesh.tensor) for block in model.blocks)
    if mesh.expert > 1:
        raise MemoryPlanError(
            "sizes alone do not tell which parameters belong to experts: pass MODEL or --hf_config"
        )
    if mesh.pipeline > 1 and model.layers is None:
        raise MemoryPlanError(
            "the size of a pipeline stage depends on the layers: pass --hidden and --layers"
        )
    if mesh.pipeline > len(layers):
        raise MemoryPlanError(f"cannot split {len(layers)} layers into {mesh.pipeline} pipeline stages")
    # the words may be needed at both ends
    return replace(model, blocks=(root, *layers[: -(-len(layers) // mesh.pipeline)]))
