"""Leaves each rank of a pipeline the parameters of its layers; the others stay, with nothing in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.waits import waits
from ..cut import Box, Cut, cut_of, mark, whole_box
from ..errors import ParameterError
from ..rank_mesh import own_group
from ..tensor_parallel.whole_states import keep_states_whole
from ..zero.unit import owner_of
from .line import Line, modules_of

CHANNEL = "pipeline"


@dataclass(frozen=True, slots=True)
class StageCut(Cut):
    """Describes a parameter that some stages have, cut or whole; others have an empty part."""

    inner: Cut | None = None
    spread: Callable[[Tensor, int], Tensor] | None = None
    """Broadcasts a tensor from a stage. Collective for a pipeline's ranks."""
    owners: tuple[int, ...] = ()
    """The stages that have the parameter."""
    is_here: bool = True
    shared: int = 1
    """How many ranks of a pipeline and of the axes that share layers have the part, on every stage: units are
    made by it, which all stages have alike."""

    @property
    def numel(self) -> int:
        """Return the number of elements that the stages which have the parameter have of it."""
        return prod(self.shape) if self.inner is None else self.inner.numel

    @property
    def copies(self) -> int:
        """Return how many ranks have a part of the parameter's that is equal."""
        return self.shared

    def __deepcopy__(self, memo: Any) -> StageCut:
        return self

    def whole(self, part: Tensor) -> Tensor:
        """Gather the whole tensor on all stages. Collective for a pipeline's ranks."""
        assert self.spread is not None
        if not self.is_here:
            whole = part.new_empty(self.shape)
        else:
            whole = part.detach() if self.inner is None else self.inner.whole(part)
        return self.spread(whole.contiguous(), self.owners[0])


class StageAxis(Axis):
    """Holds the ranks that have different layers of the same model."""

    name = "pipeline"

    def __init__(self, comm: Comm) -> None:
        """Make the process groups. Collective for all ranks."""
        super().__init__(comm)
        self.stages = comm.mesh.pipeline
        self.stage = comm.mesh.coordinates(comm.rank)["pipeline"]
        self.keep_group("passes", own_group(comm, "pipeline"))
        self.ranks = next(ranks for ranks in comm.mesh.groups("pipeline") if comm.rank in ranks)

    def spread(self, tensor: Tensor, stage: int) -> Tensor:
        """Broadcast a contiguous tensor from a stage; return it."""
        flat = tensor.view(-1).view(torch.uint8)
        work = dist.broadcast(flat, self.ranks[stage], group=self.group, async_op=True)
        self.wait(work, flat, "broadcasts a stage's state")
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace each element by the largest of the axis, in place; return it."""
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.wait(work, tensor, "compares its batch")
        return tensor

    def add_group(self, owners: tuple[int, ...]) -> None:
        """Make the group of some stages. Collective for all ranks."""
        if self.has_group(owners):
            return
        found: Any = None
        for ranks in self.comm.mesh.groups("pipeline"):
            some = [ranks[stage] for stage in owners]
            made = self.comm.new_group(some)
            found = made if self.comm.rank in some else found
        self.keep_group(owners, found)

    def sum_tied(self, tensor: Tensor, owners: tuple[int, ...]) -> None:
        """Sum a tensor in place over the stages that have a parameter."""
        self.comm._count(CHANNEL, 2 * tensor.numel())
        work = dist.all_reduce(tensor, group=self.group_for(owners), async_op=True)
        self.wait(work, tensor, "sums gradients of tied parameters")

    def wait(self, work: Any, tensor: Tensor, what: str) -> None:
        """Wait for a collective; each kind has a channel, so that the watch sees ranks in different ones."""
        key = waits.next_key(self.comm.number, f"{CHANNEL}: {what}")
        Work(work, key, f"{what} in its pipeline", tensor).wait()


def owners_of(line: Line) -> dict[int, tuple[int, ...]]:
    """Return the stages that have each parameter, by its id.

    What is registered before the layers goes to the first part, what comes after them to the last; a
    parameter of a module that contains the layers goes to all.
    """
    places: dict[int, set[int]] = {}
    parts_of: dict[int, set[int]] = {}
    for index, layer in enumerate(line.layers):
        for each in modules_of(layer):
            parts_of.setdefault(id(each), set()).add(line.part_of(index))
    has_passed = False
    for name, module in line.model.named_modules():
        has_passed = has_passed or name == line.name
        contains = not name or line.name == name or line.name.startswith(f"{name}.")
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            found = places.setdefault(id(parameter), set())
            if id(module) in parts_of:
                found |= parts_of[id(module)]
            elif contains or parameter.dim() == 0:
                found.update(range(line.parts))
            else:
                found.add(line.parts - 1 if has_passed else 0)
    return {
        identity: tuple(sorted({part % line.stages for part in parts})) for identity, parts in places.items()
    }


def leave_own(line: Line, axis: StageAxis) -> list[nn.Parameter]:
    """Empty the parameters of other stages, and mark all; return those that several stages have. Values are
    rank 0's already. Collective. Raises ParameterError for modules that keep statistics.
    """
    for name, module in line.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ParameterError(
                f"pipeline parallelism: {name}, a {type(module).__name__}, keeps running statistics that "
                "only one stage would update: use another norm"
            )
    owners, tied = owners_of(line), []
    several = sorted({stages for stages in owners.values() if len(stages) > 1})
    for one, other in combinations(several, 2):
        if len(one) == len(other) and set(one) & set(other):
            raise ParameterError(
                f"pipeline parallelism: stages {list(one)} share parameters, and stages {list(other)} share "
                "others: change pipeline.partition so that these sets are equal or disjoint"
            )
    positions = axis.comm.mesh.tensor
    for parameter in line.model.parameters():
        unit, cut = owner_of(parameter), cut_of(parameter)
        if unit is not None:
            unit.wait_unsharded()
            values = parameter.detach().clone()
            unit.hand_over(parameter)
            parameter.data = values
        shape = tuple(parameter.shape) if cut is None else cut.shape
        stages = owners[id(parameter)]
        is_here = axis.stage in stages
        base = (whole_box(shape),) * positions if cut is None else cut.boxes
        place = axis.comm.rank % positions if cut is None else cut.position
        shared = base.count(base[place]) * len(stages)
        of_experts = cut is not None and cut.of_experts
        if is_here:
            boxes = base * len(stages)
            place += stages.index(axis.stage) * len(base)
        else:
            boxes, place = (_empty(shape),), 0
            parameter.data = parameter.detach().new_empty([0] * len(shape))
        mark(
            parameter,
            StageCut(shape, boxes, place, None, of_experts, cut, axis.spread, stages, is_here, shared),
        )
        if len(stages) > 1:
            axis.add_group(stages)
            if is_here:
                tied.append(parameter)
    keep_states_whole(line.model)
    return tied


def _empty(shape: tuple[int, ...]) -> Box:
    return tuple(((0, 0),) for _ in shape)
