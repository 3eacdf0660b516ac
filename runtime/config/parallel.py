"""The `parallel` and `tensor_parallel` sections: the axes of the mesh of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .field_types import AutoInt, Bool, Count, Section, Whole, ok
from .unsupported import with_missing
from .zero import ShardGroupSize


@with_missing("parallel")
class Parallel(Section):
    """The mesh of ranks: how many share what. The sizes multiply to the number of ranks."""

    data: AutoInt = ok("auto")
    """Ranks that train on different samples; "auto": all that the other axes leave."""
    tensor: Count = ok(1)
    """Ranks that share each layer's computation (zlaunch's own key for tensor_parallel.autotp_size)."""
    shard_group: ShardGroupSize | None = ok(None)
    """Ranks that parameters are sharded over: another place for zero_optimization.shard_group."""


@with_missing("tensor_parallel")
class TensorParallel(Section):
    """Tensor parallelism: the ranks of an axis share each layer's computation."""

    autotp_size: Whole = ok(0)
    """Ranks that share each layer's computation; 0 and 1 are off."""
    plan: dict[str, str] | None = ok(None)
    """Styles of modules and parameters by name, "*" for any number, such as {"layers.*.mlp.up": "colwise"};
    null takes the model's own plan, as Hugging Face models have it (zlaunch's own key)."""
    vocab_parallel_loss: Bool = ok(False)
    """Compute a Hugging Face model's loss from each rank's part of the logits, which are never put together;
    the model's output then has that part alone (zlaunch's own key)."""


class HasAxes(Protocol):
    """Has the two sections: a config."""

    @property
    def parallel(self) -> Parallel: ...
    @property
    def tensor_parallel(self) -> TensorParallel: ...


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Holds the sizes of the mesh: rank = data position * tensor + tensor position."""

    data: int
    tensor: int

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        return {"data": rank // self.tensor, "tensor": rank % self.tensor}


def tensor_size(config: HasAxes) -> int:
    """Return how many ranks share each layer's computation."""
    return max(config.parallel.tensor, config.tensor_parallel.autotp_size, 1)


def mesh_shape(config: HasAxes, world_size: int) -> MeshShape:
    """Return the mesh of a config on so many ranks. Raises ValueError with the sizes that would do."""
    tensor, data = tensor_size(config), config.parallel.data
    key = "parallel.tensor" if config.parallel.tensor > 1 else "tensor_parallel.autotp_size"
    if world_size % tensor:
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        below = max(size for size in fitting if size <= tensor)
        above = min((size for size in fitting if size > tensor), default=0)
        nearest = f"{below} or {above}" if above else str(below)
        raise ValueError(
            f"{key}: {tensor} does not divide the {world_size} ranks; set it to {nearest}, or start "
            f"{-(-world_size // tensor) * tensor} ranks"
        )
    left = world_size // tensor
    if data not in ("auto", left):
        raise ValueError(
            f"parallel.data: {data} * tensor {tensor} is {int(data) * tensor}, not the {world_size} ranks; "
            f'set it to {left} or "auto", or start {int(data) * tensor} ranks'
        )
    return MeshShape(left, tensor)
