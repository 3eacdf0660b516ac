"""``deepspeed.utils.groups``: data, tensor, expert and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zlaunch.compat.deepspeed import sequence_groups
from zlaunch.runtime.comm.process_group import open_comms
from zlaunch.runtime.expert_parallel.axis import ExpertAxis
from zlaunch.runtime.rank_mesh import MeshShape
from zlaunch.runtime.sequence_parallel.axis import SequenceAxis
from zlaunch.runtime.tensor_parallel.axis import TensorAxis


def _newest() -> Any:
    """Return the newest engine's communicator, or None."""
    return max(open_comms, key=lambda comm: int(comm.number), default=None)


def _axis(name: str) -> Any:
    """Return the newest engine's axis of a name, or None."""
    comm = _newest()
    return None if comm is None else comm.axes.get(name)


def _mesh() -> MeshShape:
    """Return the mesh of ranks."""
    comm = _newest()
    return MeshShape(dist.get_world_size()) if comm is None else comm.mesh


def _get_sequence_data_parallel_group() -> Any:
    """Return the group of the ranks whose gradients are averaged."""
    comm = _newest()
    if comm is None or comm.data.size == comm.world_size:
        return dist.group.WORLD
    return comm.data.gather_group


def _get_sequence_data_parallel_world_size() -> int:
    """Return how many ranks' gradients are averaged."""
    comm = _newest()
    return dist.get_world_size() if comm is None else int(comm.data.size)


def _get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    comm = _newest()
    return dist.get_rank() if comm is None else int(comm.data.position)


def _get_data_parallel_group() -> Any:
    """Return the group of the ranks that train on different samples. Raises RuntimeError where some of them
    share sequences: no group has one rank of each then.
    """
    if _mesh().sequence > 1:
        raise RuntimeError(
            "with sequence parallelism, gradients are averaged over "
            "_get_sequence_data_parallel_group(): use that group"
        )
    return _get_sequence_data_parallel_group()


def _get_data_parallel_world_size() -> int:
    """Return how many ranks train on different samples."""
    return _mesh().samples


def _get_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    return _mesh().sample_position(dist.get_rank())


def _get_model_parallel_world_size() -> int:
    """Return how many ranks share each layer."""
    return _mesh().tensor


def _get_model_parallel_rank() -> int:
    """Return this rank's place among those."""
    return dist.get_rank() % _get_model_parallel_world_size()


def _get_model_parallel_group() -> Any:
    """Return the group of the ranks that share each layer; None where each has whole layers."""
    axis = _axis(TensorAxis.name)
    return None if axis is None else axis.group


def _expert_axis(group_name: str | None) -> ExpertAxis | None:
    """Return the axis of ranks with different experts. Raises ValueError for the name of another size."""
    axis: ExpertAxis | None = _axis(ExpertAxis.name)
    name = f"ep_size_{1 if axis is None else axis.size}"
    if group_name not in (None, name):
        raise ValueError(f"unknown expert-parallel group {group_name!r}: the only group is {name!r}")
    return axis


def _get_expert_parallel_world_size(group_name: str | None = None) -> int:
    """Return how many ranks have different experts."""
    axis = _expert_axis(group_name)
    return 1 if axis is None else axis.size


def _get_expert_parallel_rank(group_name: str | None = None) -> int:
    """Return this rank's place among those."""
    axis = _expert_axis(group_name)
    return 0 if axis is None else axis.place


def _get_expert_parallel_group(group_name: str | None = None) -> Any:
    """Return the group of the ranks that have different experts; None where all have all."""
    axis = _expert_axis(group_name)
    return None if axis is None else axis.group


def _get_expert_data_parallel_world_size(group_name: str | None = None) -> int:
    """Return how many ranks with different samples have this rank's experts."""
    return _get_sequence_data_parallel_world_size() // _get_expert_parallel_world_size(group_name)


def _get_expert_data_parallel_rank(group_name: str | None = None) -> int:
    """Return this rank's place among those."""
    axis = _expert_axis(group_name)
    if axis is None or axis.comm.experts is None:
        return _get_sequence_data_parallel_rank()
    return int(axis.comm.experts.position)


def _get_expert_data_parallel_group(group_name: str | None = None) -> Any:
    """Return the group of the ranks that have this rank's experts."""
    axis = _expert_axis(group_name)
    if axis is None or axis.comm.experts is None:
        return _get_sequence_data_parallel_group()
    return axis.comm.experts.gather_group


def _get_sequence_parallel_world_size() -> int:
    """Return how many ranks have parts of the same sequences."""
    return max(_mesh().sequence, sequence_groups.get_sequence_parallel_world_size())


def _get_sequence_parallel_rank() -> int:
    """Return this rank's place among those."""
    mesh = _mesh()
    if mesh.sequence == 1:
        return sequence_groups.get_sequence_parallel_rank()
    return mesh.coordinates(dist.get_rank())["sequence"]


def _get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that have parts of the same sequences; None where all have whole ones."""
    axis = _axis(SequenceAxis.name)
    if axis is not None:
        return axis.group
    alone = sequence_groups.get_sequence_parallel_world_size() == 1
    return None if alone else sequence_groups.get_sequence_parallel_group()


_get_tensor_model_parallel_world_size = _get_model_parallel_world_size
_get_tensor_model_parallel_rank = _get_model_parallel_rank
_get_tensor_model_parallel_group = _get_model_parallel_group
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank

__all__ = [name for name in globals() if "_parallel_" in name]
