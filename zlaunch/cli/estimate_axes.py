"""Read for `zlaunch estimate` how many ranks share layers, sequences, experts and stages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from zlaunch.cli.commands import count_option

if TYPE_CHECKING:
    from zlaunch.runtime.rank_mesh import MeshShape

AXES = (
    count_option("--tensor", default=1, show_default=True, help="Tensor-parallel size."),
    count_option("--sequence", default=1, show_default=True, help="Sequence-parallel size."),
    count_option("--pipeline", default=1, show_default=True, help="Pipeline stages."),
    count_option("--expert", default=1, show_default=True, help="Expert-parallel size."),
)
"""Options of the command, in the order of its help."""


def given_axes(
    world_size: int,
    seq: int,
    tensor: int,
    sequence: int,
    pipeline: int,
    expert: int,
    *,
    simulate: bool,
    has_input: bool,
) -> MeshShape:
    """Return the mesh of the options. Raises click.UsageError for sizes that do not go with the number of
    ranks, or with other options.
    """
    from zlaunch.runtime.rank_mesh import MeshShape

    sizes = {"--tensor": tensor, "--sequence": sequence, "--pipeline": pipeline, "--expert": expert}
    given = [name for name, size in sizes.items() if size > 1]
    product = math.prod(sizes.values())
    if given and simulate:
        raise click.UsageError(
            f"--simulate does not model the communication of {given[0]}: remove one of the two"
        )
    if seq % sequence:
        raise click.UsageError(f"--seq {seq} cannot be divided by --sequence {sequence}")
    if sequence > 1 and has_input:
        raise click.UsageError(
            "--sequence cannot be combined with --input: pass one rank's share of the sequence in --input"
        )
    if world_size % product:
        shown = ", ".join(f"{name} {sizes[name]}" for name in given)
        raise click.UsageError(f"{shown}: needs a multiple of {product} GPUs, not {world_size}")
    return MeshShape(world_size // product, expert, sequence, tensor, pipeline)
