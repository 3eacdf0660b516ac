"""Chooses how many ranks have different experts, where the config says ``"expert": "auto"``."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from ..config import ConfigError, Loaded, leaves_expert_size_open, with_expert_size
from ..environment import read_environment
from ..errors import ParameterError
from ..log import counted
from ..mesh import MeshShape
from .expert import count_experts


def choose_expert_size(loaded: Loaded, model: nn.Module, shape: MeshShape, local: int) -> tuple[int, str]:
    """Return the expert-parallel size, and why it is this one.

    It is the largest one that divides the experts of every module and the data-parallel ranks, and whose
    ranks are on one node: each layer exchanges tokens twice, in both passes.

    Args:
        loaded: The config. A size that it does not allow is not taken.
        model: The model.
        shape: The mesh without an expert axis.
        local: Number of ranks of a node.

    Raises:
        ParameterError: The config names modules, and they are not there or have no experts to divide.
    """
    named = loaded.config.expert_parallel.experts
    try:
        counts = count_experts(model, named)
    except ParameterError as error:
        if named is not None:
            raise
        return 1, str(error) if _has_experts(model) else "the model has no modules called experts"
    inner = shape.sequence * shape.tensor
    sizes = [size for size in range(2, shape.data + 1) if shape.data % size == 0]
    fitting = [size for size in sizes if _divides(size, counts) and local % (size * inner) == 0]
    experts = " and ".join(str(count) for count in sorted(counts))
    ranks = counted(min(shape.data, max(1, local // inner)), "data-parallel rank")
    if not fitting:
        return 1, f"no other size divides {experts} experts and {ranks} of a node"
    try:
        with_expert_size(loaded, fitting[-1])
    except ConfigError as error:
        problem = error.problems[0].removeprefix(f"{loaded.origin}: ")
        return 1, f"expert parallelism is not possible here: {problem}"
    return fitting[-1], f"the largest size that divides {experts} experts and {ranks} of a node"


def settle_expert_size(
    loaded: Loaded, model: nn.Module, shape: MeshShape, device: torch.device, *, needs_whole: str
) -> tuple[int, str]:
    """Return the size for a config, and where it comes from ("" for a number in ``parallel.expert``).
    Collective for ``"auto"``: of ranks that would choose different ones, the smallest is taken.

    ``needs_whole`` says why the script's optimizer cannot have shards of experts, if it cannot.
    """
    if not leaves_expert_size_open(loaded):
        return shape.expert, ""
    if shape.expert > 1:
        return shape.expert, "another key of the config says so"
    size, why = choose_expert_size(loaded, model, shape, read_environment().local_world_size)
    if needs_whole:
        size = 1
        why = needs_whole
    if shape.ranks == 1:
        return size, why
    smallest = torch.tensor(size, device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    if int(smallest) != size:
        return int(smallest), "another rank cannot take more"
    return size, why


def _has_experts(model: nn.Module) -> bool:
    return any("experts" in name for name, _ in model.named_modules())


def _divides(size: int, counts: Collection[int]) -> bool:
    return all(count % size == 0 for count in counts)
