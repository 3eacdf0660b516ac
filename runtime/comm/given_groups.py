"""Compares the process groups of a script's ``mpu`` with the mesh of the config."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from ..errors import RankMismatchError
from ..mesh import MeshShape

_GROUPS = {
    "tensor": ("get_tensor_model_parallel_group", "get_model_parallel_group"),
    "pipeline": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
    "sequence": ("get_sequence_parallel_group",),
    "data": ("get_data_parallel_group",),
}
"""Maps axes to the methods of Megatron's ``mpu`` that return their groups, by the first name that it has."""


def check_given_groups(mpu: Any, mesh: MeshShape, rank: int) -> None:
    """Check that ``mpu`` has put this rank into groups of the same ranks as ``mesh``, whose groups are used.

    Raises RankMismatchError with the first axis that differs, and TypeError for an ``mpu`` without groups.
    """
    found = 0
    for axis, names in _GROUPS.items():
        name = next((name for name in names if callable(getattr(mpu, name, None))), None)
        if name is None:
            continue
        found += 1
        given = _ranks(mpu, name)
        # ranks with other experts train on other samples
        along = ("data", "expert") if axis == "data" else (axis,)
        own = next(ranks for ranks in mesh.groups(*along) if rank in ranks)
        if given != own:
            advice = (
                f"zlaunch counts ranks on {', '.join(mesh.axes)}, the last one fastest"
                if len(given) == len(own)
                else f"set parallel.{axis} in the config to {len(given)}, or leave mpu out"
            )
            raise RankMismatchError(
                f"mpu.{name}(): rank {rank} is in a group of ranks {given}, but the config puts it into one "
                f"of {own}: {advice}. A model whose layers the script itself has divided between ranks, as "
                "Megatron's, is not supported"
            )
    if not found:
        known = ", ".join(itertools.chain.from_iterable(_GROUPS.values()))
        raise TypeError(f"initialize: mpu is {type(mpu).__name__}, which has none of the methods {known}")


def _ranks(mpu: Any, name: str) -> list[int]:
    """Return the ranks of the group that a method returns. Raises TypeError where it returns none."""
    group = getattr(mpu, name)()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"mpu.{name}() returned {group!r}, which is no process group of this rank")
    return sorted(dist.get_process_group_ranks(group))
