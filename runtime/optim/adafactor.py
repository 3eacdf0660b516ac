"""Steps Adafactor, whose second moment of a matrix is a sum for each row and one for each column."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..device import to_device
from ..errors import OptimizerError
from ..zero import placeholder
from ..zero.store import OpenTile, TileView
from ..zero.unit import Unit
from .collective import CollectiveStep, ParameterPart, TileWork, each_tile, gradients, work_on
from .slices import ShardSlice
from .update_rule import PARAMETER_STATE, State, UpdateRule

# -- lines ------------------------------------------------------------------------------------------
#
# Sees a parameter of two and more dimensions as matrices, one after the other, and a part of it as lines of
# them, the first and the last of which may be incomplete.


@dataclass(frozen=True, slots=True)
class _Lines:
    """Describes which lines of a parameter's matrices a part has elements of."""

    rows: int
    """Counts the lines of each matrix."""
    columns: int
    """Counts the elements of each line."""
    skipped: int
    """Counts the elements of the first line that come before the part."""
    numel: int
    """Counts the part's elements."""
    first: int
    """Numbers the first line, through all matrices of the parameter."""

    @staticmethod
    def of(part: ParameterPart) -> _Lines:
        """Return the lines of a part."""
        rows, columns = part.unit.shapes[part.index][-2:]
        first, skipped = divmod(part.offset, columns)
        return _Lines(rows, columns, skipped, part.high - part.low, first)

    @property
    def stop(self) -> int:
        """Return the last line's number plus 1."""
        return self.first + -(-(self.skipped + self.numel) // self.columns)

    @property
    def matrices(self) -> range:
        """Return the numbers of the matrices that have these lines."""
        return range(self.first // self.rows, (self.stop - 1) // self.rows + 1)

    def of_flat(self, values: Tensor) -> Tensor:
        """Return a part's elements as lines, with zeros where the part has none."""
        numel = (self.stop - self.first) * self.columns
        if numel == self.numel:
            return values.view(-1, self.columns)
        padded = values.new_zeros(numel)
        padded[self.skipped : self.skipped + self.numel] = values
        return padded.view(-1, self.columns)

    def to_flat(self, lines: Tensor) -> Tensor:
        """Return the part's elements of lines."""
        return lines.reshape(-1)[self.skipped : self.skipped + self.numel]

    def by_matrix(self, values: Tensor) -> Tensor:
        """Return, for each line, its matrix's row of ``values``, which has a row for each matrix of the
        parameter.
        """
        if len(self.matrices) == 1:
            # Once for all lines: as many copies would take as much memory as the part.
            return values[self.matrices.start].unsqueeze(0)
        return values[self._matrix_of_each(values.device)]

    def _matrix_of_each(self, device: torch.device) -> Tensor:
        """Return the number of each line's matrix."""
        return torch.arange(self.first, self.stop, device=device) // self.rows

    def sum_columns(self, lines: Tensor) -> Tensor:
        """Add up the lines of each matrix: (matrices, columns)."""
        if len(self.matrices) == 1:
            return lines.sum(0, keepdim=True)
        sums = lines.new_zeros(len(self.matrices), self.columns)
        numbers = self._matrix_of_each(lines.device)
        return sums.index_add_(0, numbers - self.matrices.start, lines)


def _is_factored(part: ParameterPart) -> bool:
    return len(part.unit.shapes[part.index]) > 1


# -- sums -------------------------------------------------------------------------------------------


class ParameterSums:
    """Adds up numbers of each parameter over all its parts, on all ranks."""

    def __init__(self, comm: Comm, units: Sequence[Unit], count: Callable[[torch.Size], int]) -> None:
        """Prepare to add up ``count(shape)`` numbers of each parameter of some units, the same on all
        ranks.
        """
        self._comm = comm
        self._first: dict[tuple[int, int], int] = {}
        """Maps a unit's identity and the index of its parameter to the position of the first number."""
        numel = 0
        for unit in units:
            for index, (slot, shape) in enumerate(zip(unit.layout.slots, unit.shapes, strict=True)):
                if unit.trainable and slot.group >= 0:
                    self._first[id(unit), index] = numel
                    numel += count(shape)
        self._numel = numel
        self._sums: dict[torch.device, Tensor] = {}

    def _on(self, device: torch.device) -> Tensor:
        """Return the sums of what is in the memory of a device."""
        if device not in self._sums:
            self._sums[device] = torch.zeros(self._numel, dtype=torch.float64, device=device)
        return self._sums[device]

    def add(self, part: ParameterPart, at: int, values: Tensor) -> None:
        """Add ``values`` of a part to the parameter's numbers from ``at`` on."""
        first = self._first[id(part.unit), part.index] + at
        # each of the ranks that keep a part adds it
        values = values.reshape(-1) / part.unit.copies
        self._on(values.device)[first : first + values.numel()] += values

    def all_reduce(self, what: str) -> None:
        """Add up what all ranks have. Collective."""
        device = self._comm.device
        total = self._on(device)
        others = [known for known in self._sums if known != device]
        for other in others:
            total += self._sums[other].to(device)
        self._comm.all_reduce_scalars(total, what)
        for other in others:
            self._sums[other].copy_(total)

    def firsts(self) -> Callable[[ParameterPart], float]:
        """Return a function that gives the first number of a part's parameter."""
        positions = torch.tensor(list(self._first.values()), dtype=torch.long)
        total = self._sums[self._comm.device]
        # All at once: the host waits for the device a single time.
        found = dict(zip(self._first, total[to_device(positions, total.device)].tolist(), strict=True))
        return lambda part: float(found[id(part.unit), part.index])

    def of(self, part: ParameterPart, at: int, count: int, device: torch.device) -> Tensor:
        """Return ``count`` numbers of the part's parameter from ``at`` on, in float64 on a device."""
        if device not in self._sums:
            self._sums[device] = self._sums[self._comm.device].to(device)
        first = self._first[id(part.unit), part.index] + at
        return self._sums[device][first : first + count]


# -- forms ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rates:
    """Holds the numbers of one parameter's step."""

    decay: float
    """Multiplies the values before they are moved."""
    rate: float
    """Multiplies the update, after its root mean square has been limited."""


class _Form(ABC):
    """Computes the rule of one implementation of Adafactor, and names its state as that does."""

    rows: str
    columns: str
    squares: str
    """Name the second moments: of rows and columns, or, of a vector, of each element."""

    @abstractmethod
    def shape_of_rows(self, shape: torch.Size) -> torch.Size:
        """Return the shape in which the second moments of a parameter's rows are kept."""

    @abstractmethod
    def shape_of_columns(self, shape: torch.Size) -> torch.Size:
        """Return the shape in which the second moments of a parameter's columns are kept."""

    def momentum(self, group: Mapping[str, Any]) -> float | None:
        """Return the decay of the average of updates that is kept for each element; None without one."""
        return None

    def names(self, part: ParameterPart, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the state that is kept for each element of a part, in order."""
        return () if _is_factored(part) else (self.squares,)

    @abstractmethod
    def squared(self, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the squares that the second moments are averages of."""

    @abstractmethod
    def weight(self, step: float, group: Mapping[str, Any]) -> float:
        """Return the weight of the new squares in the second moments."""

    @abstractmethod
    def inverse_root(self, squares: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return 1 / sqrt of the second moments of a vector, as a new tensor."""

    @abstractmethod
    def factored_inverse_root(
        self, rows: Tensor, means: Tensor, columns: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        """Return 1 / sqrt of the second moments of lines.

        Args:
            rows: Second moments of the lines' rows: (lines, 1).
            means: Mean of the second moments of all rows of each line's matrix: (lines or 1, 1).
            columns: Second moments of the columns of each line's matrix: (lines or 1, columns).
            group: The param group.
        """

    @abstractmethod
    def shrinkage(self, rms: float, group: Mapping[str, Any]) -> float:
        """Return what an update with the root mean square ``rms`` is divided by, at least 1."""

    @abstractmethod
    def rates(self, step: float, rms: float, group: Mapping[str, Any]) -> _Rates:
        """Return the rates of a parameter with the root mean square ``rms`` in its ``step``, from 1 on."""

    def note(self, entries: dict[str, Any], rms: float) -> None:
        """Keep further numbers of the implementation in a part's state."""


class _TorchForm(_Form):
    """Computes what torch.optim.Adafactor does."""

    rows = "row_var"
    columns = "col_var"
    squares = "variance"

    def shape_of_rows(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-1], 1))

    def shape_of_columns(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-2], 1, shape[-1]))

    def squared(self, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        return grad.square()

    def weight(self, step: float, group: Mapping[str, Any]) -> float:
        return float(step ** group["beta2_decay"])

    def inverse_root(self, squares: Tensor, group: Mapping[str, Any]) -> Tensor:
        # The square of eps, because the root is taken afterwards.
        return squares.clamp(min=_eps_of_torch(group, squares.dtype) ** 2).rsqrt_()

    def factored_inverse_root(
        self, rows: Tensor, means: Tensor, columns: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        eps = _eps_of_torch(group, rows.dtype)
        return ((rows / means.clamp(min=eps)) * columns).clamp_(min=eps * eps).rsqrt_()

    def shrinkage(self, rms: float, group: Mapping[str, Any]) -> float:
        return max(1.0, rms / float(group["d"]))

    def rates(self, step: float, rms: float, group: Mapping[str, Any]) -> _Rates:
        lr = float(group["lr"])
        rate = max(float(group["eps"][1]), rms) * min(lr, 1 / math.sqrt(step))
        return _Rates(1 - lr * float(group["weight_decay"]), rate)


def _eps_of_torch(group: Mapping[str, Any], dtype: torch.dtype) -> float:
    eps = group["eps"][0]
    return float(torch.finfo(dtype).eps if eps is None else eps)


class _TransformersForm(_Form):
    """Computes what transformers.optimization.Adafactor does."""

    rows = "exp_avg_sq_row"
    columns = "exp_avg_sq_col"
    squares = "exp_avg_sq"

    def shape_of_rows(self, shape: torch.Size) -> torch.Size:
        return shape[:-1]

    def shape_of_columns(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-2], shape[-1]))

    def momentum(self, group: Mapping[str, Any]) -> float | None:
        beta = group["beta1"]
        return None if beta is None else float(beta)

    def names(self, part: ParameterPart, group: Mapping[str, Any]) -> tuple[str, ...]:
        first = () if group["beta1"] is None else ("exp_avg",)
        return (*first, *super().names(part, group))

    def squared(self, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        return grad.square().add_(float(group["eps"][0]))

    def weight(self, step: float, group: Mapping[str, Any]) -> float:
        return float(step ** group["decay_rate"])

    def inverse_root(self, squares: Tensor, group: Mapping[str, Any]) -> Tensor:
        return squares.rsqrt()

    def factored_inverse_root(
        self, rows: Tensor, means: Tensor, columns: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        # The roots before the product, which would be 0 in fp32 where a row has had no gradient.
        return (rows / means).rsqrt_() * columns.rsqrt()

    def shrinkage(self, rms: float, group: Mapping[str, Any]) -> float:
        # A NaN has to reach all elements, as in transformers; max(1.0, nan) would be 1.0.
        return rms if math.isnan(rms) else max(1.0, rms / float(group["clip_threshold"]))

    def rates(self, step: float, rms: float, group: Mapping[str, Any]) -> _Rates:
        if group["relative_step"]:
            most = 1e-6 * step if group["warmup_init"] else 1e-2
            rate = min(most, 1 / math.sqrt(step))
        else:
            rate = float(group["lr"])
        if group["scale_parameter"]:
            rate *= max(float(group["eps"][1]), rms)
        return _Rates(1 - rate * float(group["weight_decay"]), rate)

    def note(self, entries: dict[str, Any], rms: float) -> None:
        entries["RMS"] = rms


def _form_of(optimizer: torch.optim.Optimizer) -> _Form:
    return _TorchForm() if isinstance(optimizer, torch.optim.Adafactor) else _TransformersForm()


# -- step -------------------------------------------------------------------------------------------


_SQUARE = 0
"""Positions the sum of the squares of a parameter's values among its sums."""
_ROWS = 1
"""Positions the sums of its rows, which the sums of its columns follow."""


class AdafactorStep(CollectiveStep):
    """Steps "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (Shazeer and Stern, 2018) as
    torch.optim.Adafactor and transformers.optimization.Adafactor implement it.

    It goes over the shards three times: for the squares of rows and columns, which all ranks add up; for the
    root mean square of each parameter's update; and for the values. Ranks exchange a number for each row and
    column, not gradients. Each rank with a part of a parameter keeps the second moments of all its rows and
    columns, under PARAMETER_STATE.
    """

    @staticmethod
    def state_count(optimizer: torch.optim.Optimizer) -> int:
        # A vector has a second moment for each element.
        return 1 + any(group.get("beta1") is not None for group in optimizer.param_groups)

    @staticmethod
    def group_states(group: Mapping[str, Any]) -> float:
        shapes = [placeholder.shape_of(parameter) for parameter in group["params"]]
        in_vectors = sum(shape.numel() for shape in shapes if len(shape) < 2)
        numel = sum(shape.numel() for shape in shapes)
        return (group.get("beta1") is not None) + in_vectors / max(1, numel)

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise OptimizerError where a group keeps more for each element than there is room for on NVMe."""
        # By the groups and the units' stores, which are alike on all ranks.
        rooms = [unit.store.state_room for unit in self.units if unit.store is not None]
        room = min((room for room in rooms if room is not None), default=None)
        if room is not None and self.state_count(rule.optimizer) > room:
            raise OptimizerError(
                f"Adafactor with beta1 keeps {self.state_count(rule.optimizer)} values for each element, and "
                f"its file on NVMe has space for {room}: set beta1 before zlaunch.initialize"
            )

    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        """Update all parts with a gradient. Collective."""
        form = _form_of(rule.optimizer)
        work = work_on(parts)
        pass_over = partial(_each_part, work, rule, state, form)
        sums = ParameterSums(self.comm, self.units, _count_sums)
        factored: list[tuple[ParameterPart, Tensor]] = []
        for each in pass_over():
            sums.add(each.part, _SQUARE, each.values.square().sum())
            square = form.squared(each.grad, each.group)
            step = each.part.count_step(state)
            if _is_factored(each.part):
                _add_lines(sums, each.part, square)
                factored.append((each.part, square.new_empty(0)))
            else:
                each.state[form.squares].lerp_(square, form.weight(step, each.group))
        # One all-reduce for all parameters, because each may lie on several ranks and in several tiles.
        sums.all_reduce("all-reduces the sums of rows and columns")
        _update_lines(form, sums, factored, state, rule.optimizer.param_groups)
        changes = ParameterSums(self.comm, self.units, lambda shape: 1)
        for each in pass_over():
            changes.add(each.part, 0, _direction(form, each).square().sum())
        changes.all_reduce("all-reduces the norms of updates")
        value_square = sums.firsts()
        change_square = changes.firsts()
        for each in pass_over(self.publish):
            numel = each.part.unit.layout.slots[each.part.index].numel
            rms = math.sqrt(value_square(each.part) / numel)
            change_rms = math.sqrt(change_square(each.part) / numel)
            rates = form.rates(float(each.entries["step"]), rms, each.group)
            form.note(each.entries, rms)
            # Computed again instead of kept: the updates of all parameters would take as much memory as the
            # gradients.
            change = _direction(form, each)
            change.mul_(rates.rate / form.shrinkage(change_rms, each.group))
            momentum = form.momentum(each.group)
            if momentum is not None:
                change = each.state["exp_avg"].mul_(momentum).add_(change, alpha=1 - momentum)
            each.values.mul_(rates.decay).sub_(change)


@dataclass(frozen=True, slots=True)
class _Stepped:
    """Holds what one pass over the shards needs of a part."""

    part: ParameterPart
    group: Mapping[str, Any]
    values: Tensor
    grad: Tensor
    """Is a copy, divided."""
    state: Mapping[str, Tensor]
    """Has the state of each element."""
    entries: dict[str, Any]


def _each_part(
    work: Sequence[TileWork],
    rule: UpdateRule,
    state: State,
    form: _Form,
    publish: Callable[[OpenTile, TileView], None] | None = None,
) -> Iterator[_Stepped]:
    """Yield the parts, tile by tile; ``publish`` a tile after its last part. Raises DiskError."""
    groups = rule.optimizer.param_groups
    for inside, tile, view in each_tile(work):
        for part in inside:
            group = groups[part.group]
            (grad,) = gradients([part], view, float(rule.divisor))
            if group.get("maximize"):
                grad.neg_()
            own = part.states(view, state, form.names(part, group))
            yield _Stepped(part, group, part.of(view, view.master), grad, own, part.entries(state))
        if publish is not None:
            publish(tile, view)


def _count_sums(shape: torch.Size) -> int:
    if len(shape) < 2:
        return _ROWS
    return _ROWS + shape[:-2].numel() * (shape[-2] + shape[-1])


def _add_lines(sums: ParameterSums, part: ParameterPart, square: Tensor) -> None:
    """Add a part's squares to the sums of its parameter's rows and columns."""
    shape = part.unit.shapes[part.index]
    lines = _Lines.of(part)
    found = lines.of_flat(square)
    sums.add(part, _ROWS + lines.first, found.sum(1))
    first = _ROWS + shape[:-1].numel()
    sums.add(part, first + lines.matrices.start * lines.columns, lines.sum_columns(found))


def _update_lines(
    form: _Form,
    sums: ParameterSums,
    parts: Sequence[tuple[ParameterPart, Tensor]],
    state: State,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Put the means of rows and columns into the second moments of the parts' parameters; each part comes
    with an empty tensor of its memory and dtype.
    """
    # Parts of one parameter in several tiles share the result, which no step changes in place.
    made: dict[tuple[int, int, torch.device], dict[str, Tensor]] = {}
    for part, empty in parts:
        key = id(part.unit), part.index, empty.device
        entries = part.entries(state)
        if key not in made:
            made[key] = _averaged(form, sums, part, entries, groups[part.group], empty)
        entries[PARAMETER_STATE] = made[key]


def _averaged(
    form: _Form,
    sums: ParameterSums,
    part: ParameterPart,
    entries: Mapping[str, Any],
    group: Mapping[str, Any],
    empty: Tensor,
) -> dict[str, Tensor]:
    """Return the new second moments of a parameter's rows and columns."""
    shape = part.unit.shapes[part.index]
    weight = form.weight(float(entries["step"]), group)
    former = entries.get(PARAMETER_STATE, {})
    rows = shape[:-1].numel()
    columns = shape[:-2].numel() * shape[-1]
    found = {}
    for name, first, count, other, kept in (
        (form.rows, _ROWS, rows, shape[-1], form.shape_of_rows(shape)),
        (form.columns, _ROWS + rows, columns, shape[-2], form.shape_of_columns(shape)),
    ):
        mean = (sums.of(part, first, count, empty.device) / other).to(empty.dtype).view(kept)
        before = former.get(name)
        found[name] = mean * weight if before is None else before.to(empty).lerp(mean, weight)
    return found


def _direction(form: _Form, each: _Stepped) -> Tensor:
    """Return a part's gradient, divided by the root of its second moment, as a new tensor."""
    part = each.part
    if not _is_factored(part):
        return form.inverse_root(each.state[form.squares], each.group).mul_(each.grad)
    lines = _Lines.of(part)
    kept = each.entries[PARAMETER_STATE]
    rows = kept[form.rows].reshape(-1, lines.rows)
    columns = kept[form.columns].reshape(-1, lines.columns)
    found = form.factored_inverse_root(
        rows.view(-1, 1)[lines.first : lines.stop],
        lines.by_matrix(rows.mean(1, keepdim=True)),
        lines.by_matrix(columns),
        each.group,
    )
    return lines.to_flat(found).mul_(each.grad)
