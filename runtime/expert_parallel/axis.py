"""Defines the ranks that have different experts, and exchanges rows of tokens between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.waits import waits
from ..rank_mesh import own_group

_CHANNEL, _STATES = "expert", "expert states"


class ExpertAxis(Axis):
    """Runs the collectives of the ranks that have different experts and different samples.

    ``comm.moved["expert"]`` counts the elements that this rank sends, those to itself included.
    """

    name = "expert"

    def __init__(self, comm: Comm) -> None:
        """Find this rank's place; :meth:`open` makes the process groups."""
        super().__init__(comm)
        assert comm.experts is not None
        self.mesh = comm.mesh
        self.size = self.mesh.expert
        self.place = self.mesh.coordinates(comm.rank)["expert"]
        self.position = self.place * self.mesh.tensor + comm.rank % self.mesh.tensor
        """This rank's place among the ranks that have all experts together, in parts."""

    def open(self) -> None:
        """Make the process groups. Collective for all ranks."""
        self.keep_group("passes", own_group(self.comm, "expert"))
        # a state that one rank alone asks for must not meet the tokens of others
        self.keep_group("states", own_group(self.comm, "expert", "tensor"))

    def gather_state(self, part: Tensor) -> list[Tensor]:
        """Return a parameter's parts of the ranks that have all experts together; ``part`` is contiguous."""
        parts = [torch.empty_like(part) for _ in range(self.size * self.mesh.tensor)]
        work = dist.all_gather(parts, part, group=self.group_for("states"), async_op=True)
        key = waits.next_key(self.comm.number, _STATES)
        Work(work, key, "all-gathers a parameter over its expert-parallel group", part).wait()
        return parts

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank of the axis, so many; return those that the ranks have sent."""
        rows = rows.contiguous()
        self.comm._count("expert", rows.numel())
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            found, rows, list(received), list(sent), group=self.group, async_op=True
        )
        self._wait(work, found)
        return found

    def _wait(self, work: Any, tensor: Tensor) -> None:
        key = waits.next_key(self.comm.number, _CHANNEL)
        Work(work, key, "exchanges tokens in its expert-parallel group", tensor).wait()


class _Exchange(torch.autograd.Function):
    """Exchanges rows of several tensors, and their gradients on the way back, always in one order."""

    @staticmethod
    def forward(
        ctx: Any, axis: ExpertAxis, sent: Sequence[int], received: Sequence[int], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return tuple(axis.exchange(each, sent, received) for each in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = exchange(ctx.axis, ctx.received, ctx.sent, *gradients)
        needed = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(each if wanted else None for each, wanted in zip(back, needed, strict=True)),
        )


def exchange(
    axis: ExpertAxis, sent: Sequence[int], received: Sequence[int], *rows: Tensor
) -> tuple[Tensor, ...]:
    """Send consecutive rows of each tensor to the ranks of an axis; return what they have sent."""
    found: tuple[Tensor, ...] = _Exchange.apply(axis, sent, received, *rows)  # type: ignore[no-untyped-call]  # torch does not type it
    return found
