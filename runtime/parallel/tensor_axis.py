"""Defines the ranks that share each layer, and what passes between their shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..comm.axis import PASSES, STATES, Axis, Channel
from ..comm.collectives import Comm
from .columns import ColumnInput
from .uses import ActivationUses

CHECKS = "checks"
LAYER = Channel("tensor", "runs a layer's collective in its tensor-parallel group", "tensor")
CHECK = Channel(
    "tensor checks", "compares its batch in its tensor-parallel group", "tensor checks", group=CHECKS
)
STATE = Channel("tensor states", "all-gathers a parameter over its tensor-parallel group", group=STATES)
"""Are the collectives of layers, counted as twice the elements of their sums and once those of their gathers;
of checks; and of parameters that are gathered."""

# -- random numbers ---------------------------------------------------------------------------------
#
# Gives ranks that share layers different random numbers where they have different activations.


class ShardRng:
    """Seeds the generators of the CPU and the device differently on each rank of the axis, between a layer
    that is sharded by columns and the next that is sharded by rows: dropout then drops other places of other
    heads.

    The seed is drawn from the state that all ranks of the axis have, which is restored afterwards. So a
    recomputation from that state draws the same numbers.
    """

    def __init__(self, position: int, device: torch.device) -> None:
        self._position = position
        self._device = device
        self._seed = 0
        self._outside: list[torch.Tensor] | None = None

    def open(self) -> None:
        """Seed the generators for this rank, unless they are already."""
        if self._is_inside():
            return
        self._seed = int(torch.randint(1 << 62, ())) + self._position
        self._outside = [torch.get_rng_state()]
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            self._outside.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.manual_seed(self._seed)  # of the current device, which is this one

    def close(self) -> None:
        """Restore the state that all ranks have, if the generators are seeded for this rank."""
        if self._is_inside() and self._outside is not None:
            torch.set_rng_state(self._outside[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._outside[1], self._device)
        self._outside = None

    def _is_inside(self) -> bool:
        """Tell whether the generators are seeded for this rank: a recomputation that ended early, or an
        exception, may have left without :meth:`close`, and somebody else has restored the state.
        """
        return self._outside is not None and torch.default_generator.initial_seed() == self._seed


# -- axis -------------------------------------------------------------------------------------------


class TensorAxis(Axis):
    """Is the axis of the ranks that share each layer. It has what the layers of a pass share."""

    def __init__(self, comm: Comm) -> None:
        """Find this rank's place; :meth:`open` makes the process groups."""
        super().__init__(comm, "tensor")
        self.watched: ActivationUses | None = None
        """Follows the activations of the pass that is going on, in the first passes."""
        self.column_input: ColumnInput | None = None
        """Holds the last input of column layers: see Note [Sums beside weight gradients] in columns.py."""
        self.shard_rng: ShardRng | None = None
        """Seeds what modules between sharded layers draw; None without dropout."""

    def open(self) -> None:
        """Make the process groups: what a rank may wrongly do alone (states, checks) never meets what others
        do, so that the watch tells them apart, and no values are mixed. Collective for all ranks.
        """
        self.make_group(PASSES)
        self.make_group(STATES)
        if self.comm.device.type == "cpu":
            self.make_group(CHECKS)
        else:  # a GPU's group takes memory, and no host waits for it
            self.share_group(CHECKS)


def shard_of_layer(axis: Axis) -> tuple[int, Callable[[Tensor], list[Tensor]]]:
    """Return this rank's place among the ranks that share each layer, and the function that gathers their
    shards of a parameter.
    """
    return axis.rank, partial(axis.all_gather, channel=STATE)
