"""An optimizer step over what rests away from the device: tiles in host memory, records on disk."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.pending import Pending
from ..offload.disk import Transfer
from ..offload.disk_shard import DiskState, DiskValues, Record, tile_ranges
from ..offload.host_gradient import HostGradient
from ..offload.manager import Offload, Place
from ..offload.transfer import settled
from ..zero.unit import Unit
from .slices import KEYS, Run
from .update_rule import Rule, State, Update, is_elementwise

Stepped = Iterator[tuple[Unit, list[Pending]]]
"""Units whose new values are out, with the uploads that bring them to the device."""


class _Publisher:
    """Brings a tile's new values to where a unit's parameters are read from."""

    def __init__(self, offload: Offload, after: torch.cuda.Event | None) -> None:
        self._link, self._after = offload.link, after

    def publish(self, unit: Unit, start: int, values: Tensor) -> Pending | None:
        """``values`` from element ``start`` of the shard on. Until the result is ``settled`` they must not
        change.
        """
        target = unit.target
        if target is None:
            return None
        if isinstance(target, DiskValues):
            target.write(start, values)
            return None
        part = target[start : start + values.numel()]
        if part.device.type == "cpu":
            if part.data_ptr() != values.data_ptr():
                part.copy_(values)
            return None
        return self._link.upload(values, part, self._after)


def _by_unit(runs: Sequence[Run], place: Place) -> Iterator[tuple[Unit, list[Run]]]:
    found: dict[int, tuple[Unit, list[Run]]] = {}
    for run in runs:
        if run.unit.state_place is place:
            found.setdefault(id(run.unit), (run.unit, []))[1].append(run)
    yield from found.values()


def _inside(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    return [run for run in runs if run.used and start <= run.start and run.stop <= stop]


def _fill_uncovered(values: Tensor, master: Tensor, runs: Sequence[Run], start: int) -> None:
    """Copy what no update will write: padding, and parameters without a gradient."""
    at = 0
    for run in [*runs, None]:
        until = values.numel() if run is None else run.start - start
        if until > at:
            values[at:until].copy_(master[at:until])
        at = values.numel() if run is None else run.stop - start


def step_in_host(
    offload: Offload, rule: Rule, runs: Sequence[Run], state: State, after: torch.cuda.Event | None
) -> Stepped:
    """Update every unit whose state is in host memory, in the order of the units.

    While one tile's new values go up to the device, the next is computed; two more pieces of page-locked
    memory, as large as a tile, are enough for that.
    """
    publisher = _Publisher(offload, after)
    shadows: deque[tuple[Pending | None, Tensor]] = deque()

    def retire(left: int) -> None:
        while len(shadows) > left:
            pending, shadow = shadows.popleft()
            settled(pending)
            offload.link.pool.give_back(shadow)

    for unit, own in _by_unit(runs, Place.HOST):
        gradient, master, target = unit.gradient_home, unit.master, unit.target
        assert isinstance(gradient, HostGradient) and master is not None
        uploads: list[Pending] = []
        narrow = target is not None and unit.dtype != master.dtype
        in_place = isinstance(target, Tensor) and target.device.type == "cpu"
        for start, stop in tile_ranges(master.numel(), offload.options.tile_numel):
            updated = _inside(own, start, stop)
            if not updated or not gradient.delivered:
                continue
            values = master[start:stop]
            if narrow and in_place:
                assert isinstance(target, Tensor)
                values = target[start:stop]
            elif narrow:
                retire(1)
                shadow = offload.link.pool.take((stop - start) * unit.dtype.itemsize)
                values = shadow[: (stop - start) * unit.dtype.itemsize].view(unit.dtype)
                _fill_uncovered(values, master[start:stop], updated, start)
            updates = []
            for run in updated:
                assert run.leaf is not None
                out = values[run.start - start : run.stop - start] if narrow else None
                updates.append(Update(run.group, run.leaf, gradient.grad[run.start : run.stop], out))
            rule.apply(updates, state)
            pending = publisher.publish(unit, start, values)
            if pending is not None:
                uploads.append(pending)
            if narrow and not in_place:
                shadows.append((pending, shadow))
        yield unit, uploads
    retire(0)


def step_on_disk(
    offload: Offload, rule: Rule, runs: Sequence[Run], after: torch.cuda.Event | None
) -> Stepped:
    """Update every unit whose state is on disk: while one record is updated, those before it are written and
    those after it read. Raises DiskError; the step is then incomplete, and training cannot go on.
    """
    publisher, ring = _Publisher(offload, after), offload.ring
    ring.drain()  # gradients that are still being written
    work = [
        (unit, unit.disk, record, _inside(own, record.start, record.stop))
        for unit, own in _by_unit(runs, Place.DISK)
        if unit.disk is not None
        for record in unit.disk.records
    ]
    work = [item for item in work if item[3] and item[0].has_gradient]
    last = {id(unit): record for unit, _, record, _ in work}
    ahead: deque[tuple[Tensor, Transfer]] = deque()
    uploads: list[Pending] = []
    position = 0
    try:
        for unit, disk, record, own in work:
            while position < len(work) and (not ahead or ring.spare):
                buffer = ring.take()
                ahead.append((buffer, work[position][1].read(work[position][2], buffer)))
                position += 1
            buffer, transfer = ahead.popleft()
            writes: list[Transfer] = []
            try:
                transfer.wait()
                pending = _update_record(rule, publisher, unit, disk, record, own, buffer)
                writes.append(disk.write(record, buffer))
                if pending is not None:
                    uploads.append(pending)
                    settled(pending)
            finally:
                ring.give_back(buffer, *writes)
            if last[id(unit)] is record:
                yield unit, uploads
                uploads = []
        ring.drain()
    finally:
        for buffer, transfer in ahead:
            ring.give_back(buffer, transfer)


def _update_record(
    rule: Rule,
    publisher: _Publisher,
    unit: Unit,
    disk: DiskState,
    record: Record,
    runs: Sequence[Run],
    buffer: Tensor,
) -> Pending | None:
    master, grad = record.region(buffer, 0), record.gradient(buffer)
    if disk.resident is not None:
        grad.copy_(disk.resident[record.start : record.stop])
    values = master
    narrow = unit.dtype != master.dtype
    if narrow:
        values = record.output(buffer, unit.dtype)
        _fill_uncovered(values, master, runs, record.start)
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    updates = []
    for run in runs:
        span = slice(run.start - record.start, run.stop - record.start)
        leaf = master[span].detach().requires_grad_()
        keys = run.scalars.get(KEYS, [])
        own = {key: value for key, value in run.scalars.items() if key != KEYS}
        for index, key in enumerate(keys):
            own[key] = record.region(buffer, 1 + index)[span]
        if own:
            state[leaf] = own
        updates.append(Update(run.group, leaf, grad[span], values[span] if narrow else None))
    rule.apply(updates, state)
    for run, update in zip(runs, updates, strict=True):
        after = state.get(update.leaf, {})
        keys = sorted(key for key, value in after.items() if is_elementwise(value, update.leaf))
        if len(keys) > record.state_count:
            raise RuntimeError(
                f"the optimizer keeps {len(keys)} values for each element ({', '.join(keys)}), but "
                f"{record.state_count} when its state was laid out on disk: set the options that need them "
                "(momentum, amsgrad) before zlaunch.initialize"
            )
        span = slice(run.start - record.start, run.stop - record.start)
        for index, key in enumerate(keys):
            home, value = record.region(buffer, 1 + index)[span], after[key]
            if value.data_ptr() != home.data_ptr():
                home.copy_(value)
        run.scalars = {key: value for key, value in after.items() if key not in keys}
        run.scalars[KEYS] = keys
    return publisher.publish(unit, record.start, values)
