"""Finds the size of each parallel axis, which several sections of a config may set."""

from __future__ import annotations

from ..mesh import MeshShape
from .schema import Config


def tensor_size(config: Config) -> int:
    """Return the size of the tensor-parallel group."""
    return max(config.parallel.tensor, config.tensor_parallel.autotp_size, 1)


def expert_size(config: Config) -> int:
    """Return how many ranks have different experts."""
    section = config.expert_parallel
    return max(config.parallel.expert, section.autoep_size if section.enabled else 1)


def sequence_size(config: Config) -> int:
    """Return how many ranks have different parts of each sequence."""
    return max(config.parallel.sequence, config.sequence_parallel_size)


def pipeline_size(config: Config) -> int:
    """Return how many ranks have different layers."""
    stages = config.pipeline.stages
    return max(config.parallel.pipeline, 1 if stages == "auto" else int(stages))


def mesh_shape(config: Config, world_size: int) -> MeshShape:
    """Return the mesh of a config on ``world_size`` ranks. Raises ValueError with the sizes that fit."""
    parallel = config.parallel
    sizes = {
        "tensor": (tensor_size(config), "tensor_parallel.autotp_size"),
        "sequence": (sequence_size(config), "sequence_parallel_size"),
        "expert": (expert_size(config), "expert_parallel.autoep_size"),
        "pipeline": (pipeline_size(config), "pipeline.stages"),
    }
    left = world_size
    taken = ""
    for name, (size, other_key) in sizes.items():
        key = f"parallel.{name}" if getattr(parallel, name) > 1 else other_key
        _check_divides(key, size, left, f"{world_size} ranks{taken}", world_size // left)
        left //= size
        taken += f" / {name} {size}" if size > 1 else ""
    data = (config.data_parallel_size or "auto") if parallel.data == "auto" else parallel.data
    if data not in ("auto", left):
        key = "data_parallel_size" if parallel.data == "auto" else "parallel.data"
        shape = MeshShape(int(data), **{name: size for name, (size, _) in sizes.items()})
        factors = "".join(f" * {name} {n}" for name, n in shape.axes.items() if name != "data")
        raise ValueError(
            f"{key}: {data}{factors} is {shape.ranks}, not the {world_size} ranks; "
            f'set it to {left} or "auto", or start {shape.ranks} ranks'
        )
    return MeshShape(left, **{name: size for name, (size, _) in sizes.items()})


def _check_divides(key: str, size: int, total: int, what: str, ranks_each: int) -> None:
    """Raise ValueError with the nearest sizes if a size does not divide a number of ranks."""
    if total % size == 0:
        return
    fitting = [each for each in range(1, total + 1) if total % each == 0]
    below = max(each for each in fitting if each <= size)
    above = min((each for each in fitting if each > size), default=0)
    nearest = f"{below} or {above}" if above else str(below)
    raise ValueError(
        f"{key}: {size} does not divide the {what}; set it to {nearest}, or start "
        f"{-(-total // size) * size * ranks_each} ranks"
    )
