"""A unit's values and optimizer state as flat pieces in the order of a file, wherever they rest, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..offload.disk_shard import DiskState, DiskValues, Record
from ..offload.manager import Offload
from ..optim.slices import KEYS, Run
from ..optim.update_rule import is_elementwise
from ..zero.eligible import is_shardable
from ..zero.hooks import ShardedModel
from ..zero.unit import Unit
from .format.manifest import VALUE
from .format.tensor_file import DTYPES, NAMES, CheckpointError

AS_MASTER = "master"
State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Description:
    """What an optimizer keeps for a parameter: the tensors of its size by name, with their dtypes (AS_MASTER
    where that is the master's), and the other entries as JSON.
    """

    tensors: tuple[tuple[str, str], ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "scalars": {key: list(value) for key, value in self.scalars}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Description:
        scalars = tuple((key, tuple(entry)) for key, entry in sorted(value["scalars"].items()))
        return Description(tuple(sorted(value["tensors"].items())), scalars)


def describe(run: Run, state: State, optimizer: str) -> Description:
    """Raises CheckpointError for state that cannot be cut: a tensor that is neither of its parameter's size
    nor a single number.
    """
    entries = run.scalars if run.leaf is None else state.get(run.leaf, {})
    tensors: dict[str, str] = {}
    if run.leaf is None and run.unit.disk is not None:
        tensors = dict.fromkeys(run.scalars.get(KEYS, []), AS_MASTER)
    scalars: dict[str, tuple[str, Any]] = {}
    for key, value in entries.items():
        if key == KEYS:
            continue
        if run.leaf is not None and is_elementwise(value, run.leaf):
            tensors[key] = AS_MASTER if value.dtype == run.leaf.dtype else NAMES[value.dtype]
        elif isinstance(value, Tensor) and (value.numel() == 1 or _is_whole(run)):
            scalars[key] = NAMES[value.dtype], value.tolist()  # nested lists keep its shape
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[key] = "", value
        else:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise CheckpointError(
                f"optimizer {optimizer} keeps {key!r}, {what}, which belongs to no single element: "
                "such state cannot be saved in shards"
            )
    return Description(tuple(sorted(tensors.items())), tuple(sorted(scalars.items())))


def _is_whole(run: Run) -> bool:
    """Whether the run is one parameter in its shape, whose state may be of any shape (sums of rows)."""
    return run.leaf is not None and run.leaf.dim() > 1


def persistent(sharded: ShardedModel) -> dict[str, Tensor]:
    """What every rank has whole and belongs to the state: persistent buffers, and parameters of integers."""
    found: dict[str, Tensor] = {}
    for prefix, module in sharded.module.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    for name, parameter in sharded.module.named_parameters():
        if not is_shardable(parameter):
            found[name] = parameter.data
    return found


# -- out


Described = tuple[Run, Description]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``first`` to ``last`` of a unit's flat buffer with all that is kept for them."""

    unit: Unit
    prefix: str
    first: int
    last: int
    kinds: dict[str, torch.dtype]
    """VALUE and the states, in the order of the file."""
    resident: bool
    """In memory, not on disk."""
    runs: Sequence[Described]
    open: Callable[[], Any]
    """A context that gives for every kind its consecutive flat pieces, on any device."""

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * sum(dtype.itemsize for dtype in self.kinds.values())


def blocks_of(
    unit: Unit,
    prefix: str,
    runs: Sequence[Described],
    state: State,
    offload: Offload | None,
    low: int,
    high: int,
) -> list[Block]:
    """What a rank writes of a unit: the elements ``low`` to ``high`` of its flat buffer, which it has."""
    if not unit.trainable:
        home, kinds = unit.home, {VALUE: unit.dtype}
        on_disk = isinstance(home, DiskValues)
        return [
            Block(unit, f"{prefix}.0000", low, high, kinds, not on_disk, (), lambda: _frozen(unit, low, high))
        ]
    if unit.disk is not None:
        assert offload is not None
        disk = unit.disk
        found = []
        for number, record in enumerate(disk.records):
            own = [each for each in runs if record.start <= each[0].start < record.stop]
            kinds = _kinds(own, record.dtype)
            found.append(
                Block(
                    unit,
                    f"{prefix}.{number:04d}",
                    unit.start + record.start,
                    unit.start + record.stop,
                    kinds,
                    False,
                    own,
                    _reader(disk, record, [run for run, _ in own], kinds, offload),
                )
            )
        return found
    assert unit.master is not None
    start, stop = low - unit.start, high - unit.start
    own = [each for each in runs if each[0].start < stop and each[0].stop > start]
    kinds = _kinds(own, unit.master.dtype)
    return [
        Block(
            unit,
            f"{prefix}.0000",
            low,
            high,
            kinds,
            True,
            own,
            lambda: _resident(unit, [run for run, _ in own], state, kinds, start, stop),
        )
    ]


def _kinds(runs: Sequence[Described], dtype: torch.dtype) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for _, what in runs:
        for key, name in what.tensors:
            found[key] = dtype if name == AS_MASTER else DTYPES[name]
    return {VALUE: dtype, **dict(sorted(found.items()))}


@contextmanager
def _frozen(unit: Unit, low: int, high: int) -> Iterator[dict[str, list[Tensor]]]:
    home = unit.home
    if isinstance(home, DiskValues):
        reading = home.start_read()
        yield {VALUE: [reading.wait()]}
        reading.release()
    elif isinstance(home, Tensor):
        yield {VALUE: [home]}
    else:
        yield {VALUE: [unit.full[low:high]]}


@contextmanager
def _resident(
    unit: Unit, runs: Sequence[Run], state: State, kinds: Mapping[str, torch.dtype], start: int, stop: int
) -> Iterator[dict[str, list[Tensor]]]:
    assert unit.master is not None
    pieces = {VALUE: [unit.master[start:stop]]}
    for key in kinds:
        if key == VALUE:
            continue
        pieces[key] = []
        at = start
        for run in runs:
            value = state.get(run.leaf, {}).get(key) if run.leaf is not None else None
            low, high = max(run.start, start), min(run.stop, stop)
            if value is None or not is_elementwise(value, run.leaf):  # type: ignore[arg-type]
                continue
            if low > at:
                pieces[key].append(torch.zeros(low - at, dtype=kinds[key]))
            pieces[key].append(value.reshape(-1)[low - run.start : high - run.start])
            at = high
        if at < stop:
            pieces[key].append(torch.zeros(stop - at, dtype=kinds[key]))
    yield pieces


def _reader(
    disk: DiskState, record: Record, runs: Sequence[Run], kinds: Mapping[str, torch.dtype], offload: Offload
) -> Callable[[], Any]:
    @contextmanager
    def read() -> Iterator[dict[str, list[Tensor]]]:
        offload.ring.drain()
        buffer = offload.ring.take()
        try:
            disk.read(record, buffer).wait()
            pieces = {VALUE: [record.region(buffer, 0)]}
            for key in kinds:
                if key == VALUE:
                    continue
                pieces[key], at = [], record.start
                for run in runs:
                    keys = run.scalars.get(KEYS, [])
                    if key not in keys:
                        continue
                    if run.start > at:
                        pieces[key].append(torch.zeros(run.start - at, dtype=kinds[key]))
                    region = record.region(buffer, 1 + keys.index(key))
                    pieces[key].append(region[run.start - record.start : run.stop - record.start])
                    at = run.stop
                if at < record.stop:
                    pieces[key].append(torch.zeros(record.stop - at, dtype=kinds[key]))
            yield pieces
        finally:
            offload.ring.give_back(buffer)

    return read


# -- in

Fill = Callable[[Tensor, int, str], None]
"""``fill(target, first, kind)``: overwrite those elements of ``target``, which are the unit's from ``first``
on, that are to be loaded.
"""


def take_values(unit: Unit, fill: Fill, offload: Offload | None) -> None:
    """Load this rank's values of a unit: the masters, and what the parameters are read from. Raises
    DiskError, CheckpointError.
    """
    if not unit.trainable:
        _take_frozen(unit, fill)
    elif unit.disk is not None:
        assert offload is not None
        _take_on_disk(unit, unit.disk, fill, None, offload)
    else:
        assert unit.master is not None
        _fill_on(unit.master, unit.start, VALUE, fill)
        _publish(unit, 0, unit.master)


def take_state(
    unit: Unit,
    runs: Sequence[Described],
    fill: Fill,
    state: dict[Tensor, dict[str, Any]],
    offload: Offload | None,
    on_device: bool,
) -> None:
    """Load this rank's optimizer state of a unit, whose runs have been split by what is kept for them.

    ``on_device``: the optimizer wants its counters where its parameters are. Raises DiskError,
    CheckpointError.
    """
    if unit.disk is not None:
        assert offload is not None
        for run, what in runs:
            keys = [key for key, _ in what.tensors]
            if len(keys) > unit.disk.records[0].state_count:
                raise CheckpointError(
                    f"the checkpoint has {len(keys)} values for each element ({', '.join(keys)}), and the "
                    f"optimizer's records on disk have room for {unit.disk.records[0].state_count}"
                )
            run.scalars = {key: _scalar(name, value, None) for key, (name, value) in what.scalars}
            if what != Description():
                run.scalars[KEYS] = keys
        _take_on_disk(unit, unit.disk, fill, runs, offload)
        return
    for run, what in runs:
        assert run.leaf is not None
        former = state.pop(run.leaf, {})
        if what == Description():
            continue
        wide = [key for key, (_, value) in what.scalars if isinstance(value, list) and len(value) > 1]
        if wide and not _is_whole(run):
            raise CheckpointError(
                f"the checkpoint has {wide[0]!r} of whole parameters, which flat shards cannot take: load it "
                "at stage 0 or on one rank, without offload_optimizer, or with load_optimizer_states=False"
            )
        device = run.leaf.device if on_device else None
        own: dict[str, Any] = {key: _scalar(name, value, device) for key, (name, value) in what.scalars}
        for key, name in what.tensors:
            dtype = run.leaf.dtype if name == AS_MASTER else DTYPES[name]
            present = former.get(key)
            if present is None or not is_elementwise(present, run.leaf) or present.dtype != dtype:
                present = torch.zeros_like(run.leaf, dtype=dtype, requires_grad=False)
            own[key] = present
            _fill_on(own[key].view(-1), unit.start + run.start, key, fill)
        state[run.leaf] = own


def _fill_on(target: Tensor, first: int, kind: str, fill: Fill) -> None:
    """Fill a tensor on any device by way of the host, some elements at a time."""
    if target.device.type == "cpu":
        fill(target.detach(), first, kind)
        return
    for start in range(0, target.numel(), _PIECE_NUMEL):
        part = target.detach()[start : start + _PIECE_NUMEL]
        host = part.cpu()
        fill(host, first + start, kind)
        part.copy_(host)


_PIECE_NUMEL = 8 << 20


def _take_frozen(unit: Unit, fill: Fill) -> None:
    home = unit.home
    if isinstance(home, DiskValues):
        reading = home.start_read()
        values = reading.wait().clone()
        reading.release()
        fill(values, unit.layout.shard_range(unit.comm.rank)[0], VALUE)
        home.write(0, values)
        home.finish_writes()
    elif isinstance(home, Tensor):
        _fill_on(home, unit.layout.shard_range(unit.comm.rank)[0], VALUE, fill)
    else:
        _fill_on(unit.full, 0, VALUE, fill)


def _take_on_disk(
    unit: Unit,
    disk: DiskState,
    fill: Fill,
    runs: Sequence[Described] | None,
    offload: Offload,
) -> None:
    """Values (``runs`` None) or states, record by record: read, change, write."""
    ring = offload.ring
    ring.drain()
    for record in disk.records:
        buffer = ring.take()
        writes = []
        try:
            disk.read(record, buffer).wait()
            first = unit.start + record.start
            if runs is None:
                fill(record.region(buffer, 0), first, VALUE)
                _publish(unit, record.start, record.region(buffer, 0))
            for run, what in runs or ():
                if not record.start <= run.start < record.stop:
                    continue
                span = slice(run.start - record.start, run.stop - record.start)
                for index, (key, _) in enumerate(what.tensors):
                    fill(record.region(buffer, 1 + index)[span], unit.start + run.start, key)
            writes.append(disk.write(record, buffer))
        finally:
            ring.give_back(buffer, *writes)
    ring.drain()


def _scalar(dtype: str, value: Any, device: torch.device | None) -> Any:
    return torch.tensor(value, dtype=DTYPES[dtype], device=device) if dtype else value


def _publish(unit: Unit, start: int, values: Tensor) -> None:
    """Bring master values to where the unit's parameters are read from. Raises DiskError."""
    target = unit.target
    if isinstance(target, DiskValues):
        target.write(start, values)
        target.finish_writes()
    elif target is not None:
        part = target[start : start + values.numel()]
        if part.data_ptr() != values.data_ptr():
            part.copy_(values)
