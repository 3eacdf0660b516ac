"""Reads and writes a unit's values and optimizer state as flat pieces in the order of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.narrow_state import is_narrow, is_scale, keep_or_make, kind_of, narrow_entries, put
from ..device import stream_mark
from ..optim.registry import parameter_states
from ..optim.slices import ShardSlice, make_narrow
from ..optim.update_rule import PARAMETER_STATE, State, is_elementwise
from ..zero.hooks import ShardedModel
from ..zero.layout import Range
from ..zero.policy import is_shardable
from ..zero.store import Access, open_all, open_tiles
from ..zero.unit import Unit
from .format.manifest import VALUE
from .format.tensor_file import DTYPES, NAMES, CheckpointError, from_json, to_json

AS_MASTER = "master"


@dataclass(frozen=True, slots=True)
class Description:
    """Describes what an optimizer keeps for a parameter: the tensors of its size by name, with their dtypes
    (AS_MASTER where that is the master's), and the other entries as JSON.
    """

    tensors: tuple[tuple[str, str], ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "scalars": {key: list(value) for key, value in self.scalars}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Description:
        scalars = tuple((key, tuple(entry)) for key, entry in sorted(value["scalars"].items()))
        return Description(tuple(sorted(value["tensors"].items())), scalars)


def describe(part: ShardSlice, state: State, optimizer: str) -> Description:
    """Describe a slice's optimizer state. Raises CheckpointError for state that cannot be cut: a tensor that
    is neither of its parameter's size nor a single number.
    """
    tensors = dict.fromkeys(part.on_disk, AS_MASTER)
    scalars: dict[str, tuple[str, Any]] = {}
    entries = part.entries(state)
    for key, value in entries.items():
        # Narrow state is saved wide, so its scales need no place in the file.
        if is_scale(entries, key):
            continue
        if key == PARAMETER_STATE:
            scalars |= {name: (NAMES[shared.dtype], to_json(shared)) for name, shared in value.items()}
            continue
        if part.leaf is not None and is_elementwise(value, part.leaf):
            wide = is_narrow(entries, key) or value.dtype == _wide(part.leaf.dtype)
            # AS_MASTER instead of a dtype: a load creates the state in the dtype of its own masters.
            tensors[key] = AS_MASTER if wide else NAMES[value.dtype]
        elif isinstance(value, Tensor) and (value.numel() == 1 or _is_whole(part)):
            scalars[key] = NAMES[value.dtype], to_json(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[key] = "", value
        else:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise CheckpointError(
                f"optimizer {optimizer} keeps {key!r}, {what}, which belongs to no single element: "
                "such state cannot be saved in shards"
            )
    return Description(tuple(sorted(tensors.items())), tuple(sorted(scalars.items())))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which files have the values and the state of master values of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _is_whole(part: ShardSlice) -> bool:
    """Tell whether a slice is one parameter in its shape, whose state may be of any shape (sums of rows)."""
    return part.leaf is not None and part.leaf.dim() > 1


def persistent(sharded: ShardedModel) -> dict[str, Tensor]:
    """Return the state that every rank has whole: persistent buffers, and parameters of integers."""
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


Described = tuple[ShardSlice, Description]
Pieces = Mapping[str, Sequence[Tensor]]
"""Kinds of a block, each as consecutive flat pieces."""


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """Describes elements ``first`` to ``last`` of a unit's flat buffer with all that is kept for them."""

    unit: Unit
    prefix: str
    first: int
    last: int
    kinds: dict[str, torch.dtype]
    """VALUE and the states, in the order of the file."""
    resident: bool
    """Tells whether the elements are in memory, not on disk."""
    slices: Sequence[Described]
    open: Callable[[], AbstractContextManager[Pieces]]
    """Opens a context that gives the pieces of every kind, on any device."""

    @property
    def nbytes(self) -> int:
        """Return the size of all kinds."""
        return (self.last - self.first) * sum(dtype.itemsize for dtype in self.kinds.values())


def blocks_of(
    unit: Unit, prefix: str, slices: Sequence[Described], state: State, low: int, high: int
) -> list[ShardBlock]:
    """List the blocks that a rank writes of a unit: the elements ``low`` to ``high`` of its flat buffer,
    which it has. What is on disk makes one block for each tile; what is in memory, one for each run of slices
    with the same kinds of state.
    """
    store = unit.store
    if store is None:
        frozen = ShardBlock(
            unit,
            f"{prefix}.0000",
            low,
            high,
            {VALUE: unit.dtype},
            unit.values.tensor is not None,
            (),
            lambda: _read_frozen(unit, low, high),
        )
        return [frozen]
    ranges: Sequence[Range] = store.tiles
    if store.master is not None:
        ranges = _runs(slices, low - unit.start, high - unit.start)
    found = []
    for number, (start, stop) in enumerate(ranges):
        own = [each for each in slices if each[0].start < stop and each[0].stop > start]
        kinds = _kinds(own, _wide(unit.dtype))
        found.append(
            ShardBlock(
                unit,
                f"{prefix}.{number:04d}",
                unit.start + start,
                unit.start + stop,
                kinds,
                store.master is not None,
                own,
                partial(_read, unit, (start, stop), [part for part, _ in own], state, kinds),
            )
        )
    return found


def _runs(slices: Sequence[Described], start: int, stop: int) -> list[Range]:
    """Divide a range of a shard where slices begin whose state has other tensors."""
    # Each kind is a tensor over its whole block: of one block, Adafactor's state of vectors would fill the
    # matrices between them with zeros.
    ends = [start]
    kinds = None
    for part, what in slices:
        if part.start >= stop or part.stop <= start:
            continue
        if kinds not in (None, what.tensors):
            ends.append(part.start)
        kinds = what.tensors
    return list(pairwise([*ends, stop]))


def _kinds(slices: Sequence[Described], dtype: torch.dtype) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for _, what in slices:
        for key, name in what.tensors:
            found[key] = dtype if name == AS_MASTER else DTYPES[name]
    return {VALUE: dtype, **dict(sorted(found.items()))}


@contextmanager
def _read_frozen(unit: Unit, low: int, high: int) -> Iterator[Pieces]:
    with unit.values.read() as values:
        yield {VALUE: [values[low - unit.start : high - unit.start]]}


@contextmanager
def _read(
    unit: Unit, tile: Range, slices: Sequence[ShardSlice], state: State, kinds: Mapping[str, torch.dtype]
) -> Iterator[Pieces]:
    """Yield the pieces of a tile: of each kind the slices' parts, with zeros between them."""
    assert unit.store is not None
    # A kind is one tensor over all elements of the block. Between slices (padding, parameters without this
    # state) it has zeros.
    with open_tiles([(unit.store, tile, None)], Access.READ) as tiles:
        for _, _, view in tiles:
            pieces: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
            ends = dict.fromkeys(kinds, view.start)
            pieces[VALUE] = [view.master.to(kinds[VALUE])]
            ends[VALUE] = view.stop
            for part in slices:
                low = max(part.start, view.start)
                high = min(part.stop, view.stop)
                for key, value in part.tensors_in(view, state).items():
                    if low > ends[key]:
                        pieces[key].append(torch.zeros(low - ends[key], dtype=kinds[key]))
                    pieces[key].append(value.reshape(-1)[low - part.start : high - part.start])
                    ends[key] = high
            for key, end in ends.items():
                if end < view.stop:
                    pieces[key].append(torch.zeros(view.stop - end, dtype=kinds[key]))
            yield pieces


# -- in

Fill = Callable[[Tensor, int, str], None]
"""Overwrites, as ``fill(target, first, kind)``, those elements of ``target``, which are the unit's from
``first`` on, that are to be loaded.
"""


def take_values(unit: Unit, fill: Fill, *, rounded: bool = False) -> None:
    """Load this rank's values of a unit: the masters, and what the parameters are read from. Raises
    DiskError, CheckpointError. ``rounded``: round the masters to the unit's dtype.
    """
    if unit.store is None:
        with unit.values.read() as values:
            changed = values.clone() if unit.values.tensor is None else values
            _fill_on(changed, unit.start, VALUE, fill)
        unit.values.write(0, changed)
    else:
        # A pass that is still computed on the device, or a gather, may read what uploads overwrite.
        after = stream_mark(unit.comm.device)
        with open_all(unit.store, Access.MASTER) as tiles:
            for _, tile, view in tiles:
                _fill_on(view.master, unit.start + view.start, VALUE, fill)
                if rounded:
                    view.master.copy_(view.master.to(unit.dtype))
                # See Note [New values] in zero/store.py. The host waits: the tile's memory is used again.
                tile.publish(after).synchronize()
    unit.values.flush()
    # The link may keep a copy of the old values for repeated gathers.
    unit.link.changed(unit.tag)


def take_state(unit: Unit, slices: Sequence[Described], fill: Fill, optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's optimizer state of a unit, whose slices have been split by what is kept for them.
    Raises DiskError, CheckpointError.
    """
    store = unit.store
    state = optimizer.state
    assert store is not None
    names = parameter_states(optimizer)
    shared = [_take_shared(part, what, fill, names) for part, what in slices]
    slices = [(part, _without(what, names)) for part, what in slices]
    for (part, what), whole in zip(slices, shared, strict=True):
        group = optimizer.param_groups[part.group]
        on_device = bool(group.get("fused") or group.get("capturable"))
        kind = group.get("state_dtype") or "fp32"
        make_narrow(optimizer, part)
        # All entries exist before any is filled: tensors_in() below finds a slice's tensors by them.
        _take_entries(part, what, state, store.state_room, on_device, kind)
        if whole:
            own = part.scalars if part.leaf is None else state.setdefault(part.leaf, {})
            own[PARAMETER_STATE] = whole
    if not any(what.tensors for _, what in slices):
        return
    with open_all(store, Access.WRITE) as tiles:
        for _, _, view in tiles:
            for part, what in slices:
                if view.start <= part.start and part.stop <= view.stop:
                    found = part.tensors_in(view, state)
                    own = state.get(part.leaf, {}) if part.leaf is not None else {}
                    for key, _ in what.tensors:
                        _fill_on(found[key].view(-1), unit.start + part.start, key, fill)
                        if is_narrow(own, key):
                            put(own, key, found[key], kind_of(own, key))


def _take_shared(part: ShardSlice, what: Description, fill: Fill, names: Sequence[str]) -> dict[str, Tensor]:
    """Return those tensors of a description that a step keeps for whole parameters, by name."""
    found = {key: from_json(name, value) for key, (name, value) in what.scalars if key in names}
    unit = part.unit
    for key, name in what.tensors:
        if key in names:
            # Where a step had whole tensors, a sum for each row of one column was like state of each element.
            index = unit.layout.overlaps(unit.start + part.start, unit.start + part.stop)[0][0]
            slot = unit.layout.slots[index]
            dtype = _wide(unit.dtype) if name == AS_MASTER else DTYPES[name]
            whole = torch.zeros(slot.numel, dtype=dtype)
            fill(whole, slot.offset, key)
            found[key] = whole.view(unit.shapes[index])
    return found


def _without(what: Description, names: Sequence[str]) -> Description:
    """Return a description without some names."""
    return Description(
        tuple(each for each in what.tensors if each[0] not in names),
        tuple(each for each in what.scalars if each[0] not in names),
    )


def _take_entries(
    part: ShardSlice, what: Description, state: State, room: int | None, on_device: bool, kind: str
) -> None:
    """Give a slice the state entries of its description; their tensors are filled afterwards.

    ``on_device``: the optimizer wants its counters where its parameters are. ``kind``: the param group's
    ``state_dtype``.
    """
    keys = [key for key, _ in what.tensors]
    if part.leaf is None:
        assert room is not None
        if len(keys) > room:
            raise CheckpointError(
                f"the checkpoint has {len(keys)} values for each element ({', '.join(keys)}), and the "
                f"optimizer's NVMe file has space for {room}"
            )
        part.scalars = {key: from_json(name, value) for key, (name, value) in what.scalars}
        part.on_disk = keys
        return
    # What the checkpoint lacks must not stay: it would be state of other values.
    former = state.pop(part.leaf, {})
    if what == Description():
        return
    wide = [key for key, (_, value) in what.scalars if _is_wide(value)]
    if wide and not _is_whole(part):
        raise CheckpointError(
            f"the checkpoint has {wide[0]!r} for whole parameters, which flat shards cannot use: load it at "
            "stage 0 or on one rank, without offload_optimizer, or with load_optimizer_states=False"
        )
    device = part.leaf.device if on_device else None
    own: dict[str, Any] = {key: from_json(name, value, device) for key, (name, value) in what.scalars}
    for key, name in what.tensors:
        if kind_of(former, key) == "bitsandbytes":
            own |= narrow_entries(former, key)
            continue
        if kind != "fp32":
            own |= keep_or_make(former, part.leaf, key, kind)
            continue
        dtype = _wide(part.leaf.dtype) if name == AS_MASTER else DTYPES[name]
        present = former.get(key)
        # A tensor that fits is used again: the state is never in memory twice.
        if present is None or not is_elementwise(present, part.leaf) or present.dtype != dtype:
            present = torch.zeros_like(part.leaf, dtype=dtype, requires_grad=False)
        own[key] = present
    state[part.leaf] = own


def _is_wide(value: Any) -> bool:
    """Tell whether an entry has several numbers; older checkpoints have them in a list."""
    return isinstance(value, Mapping) or (isinstance(value, list) and len(value) > 1)


def _fill_on(target: Tensor, first: int, kind: str, fill: Fill) -> None:
    """Fill a tensor on any device by way of the host, some elements at a time."""
    if target.device.type == "cpu":
        fill(target.detach(), first, kind)
        return
    for start in range(0, target.numel(), _PIECE_NUMEL):
        part = target.detach()[start : start + _PIECE_NUMEL]
        # Read before it is filled: elements that the checkpoint lacks keep their values.
        host = part.cpu()
        fill(host, first + start, kind)
        part.copy_(host)


_PIECE_NUMEL = 8 << 20
