"""``deepspeed.runtime.sequence_parallel.parallel_state_sp``: the groups of ranks that share sequences."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zlaunch.runtime.comm.process_group import new_group
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.mesh import MeshShape

_group: Any = None
_size = 1


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups of so many consecutive ranks. Collective. Raises ParameterError for another size than
    before, and one that does not divide the ranks.
    """
    global _group, _size
    world_size = dist.get_world_size()
    size = sequence_parallel_size
    if size < 2 or world_size % size:
        raise ParameterError(f"sequence_parallel_size: {size} does not divide the {world_size} ranks")
    if _group is not None:
        if size != _size:
            raise ParameterError(f"sequence_parallel_size: {size} contradicts {_size}, given before")
        return
    for ranks in MeshShape(world_size // size, sequence=size).groups("sequence"):
        made = new_group(ranks)
        if dist.get_rank() in ranks:
            _group = made
            _size = size


def get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that have parts of the same sequences. Raises ParameterError before
    there are groups.
    """
    if _group is None:
        raise ParameterError("sequence parallelism is off: call register_with_transformers first")
    return _group


def get_sequence_parallel_world_size() -> int:
    """Return how many ranks have parts of the same sequences."""
    return _size


def get_sequence_parallel_rank() -> int:
    """Return this rank's place among those."""
    return dist.get_rank() % _size


def get_sequence_data_parallel_group() -> Any:
    """Return the group that gradients are averaged over: all ranks."""
    return dist.group.WORLD


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of all ranks."""
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's number."""
    return dist.get_rank()


get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
