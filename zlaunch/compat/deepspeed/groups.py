"""``deepspeed.utils.groups``: all ranks are data-parallel, every other dimension has one rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _get_data_parallel_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    """Return this rank."""
    return dist.get_rank()


def _get_one() -> int:
    """Return the size of a dimension of one rank."""
    return 1


def _get_zero() -> int:
    """Return the only rank of a dimension of one."""
    return 0


def _get_no_group() -> None:
    """Return None: there is no such group."""


_get_sequence_parallel_world_size = _get_model_parallel_world_size = _get_one
_get_tensor_model_parallel_world_size = _get_expert_parallel_world_size = _get_one
_get_sequence_parallel_rank = _get_model_parallel_rank = _get_tensor_model_parallel_rank = _get_zero
_get_sequence_parallel_group = _get_model_parallel_group = _get_tensor_model_parallel_group = _get_no_group
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank

__all__ = [name for name in globals() if "_parallel_" in name]
