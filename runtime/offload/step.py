"""Runs the part of an optimizer step that is not on the device, at once or in the background."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.step import SliceUpdate
from ..comm.collectives import Comm
from ..comm.pending import Pending
from ..device import named, stream_mark
from ..errors import OptimizerError
from ..optim.slices import ShardSlice
from ..optim.step import StepMethod
from ..optim.update_rule import State, UpdateRule, is_elementwise
from ..threads import make_thread
from ..zero.layout import Range
from ..zero.store import Access, ShardStore, TileView, open_tiles
from ..zero.unit import Unit

# -- offloaded step ---------------------------------------------------------------------------------
#
# Steps the shards that are off the device, tile by tile.


_Work = tuple[ShardStore, Range, tuple[Unit, list[ShardSlice], bool]]
"""Holds a tile, its unit, its slices, and whether it is the unit's last tile."""


def step_tiles(
    rule: UpdateRule, slices: Sequence[ShardSlice], state: State, after: torch.cuda.Event | None
) -> Iterator[tuple[Unit, list[Pending]]]:
    """Update every unit that is off the device, in the order of the units, and yield each with the uploads of
    its new values; none of them starts before ``after``.

    While one tile is updated, the new values of those before it are uploaded and those after it are read. The
    work is listed at once; the result may be iterated over by another thread, and raises DiskError: the step
    is then incomplete, and training cannot go on.
    """
    return _step_tiles(rule, _work(slices), state, after)


def _step_tiles(
    rule: UpdateRule, work: Sequence[_Work], state: State, after: torch.cuda.Event | None
) -> Iterator[tuple[Unit, list[Pending]]]:
    uploads: list[Pending] = []
    with open_tiles(work, Access.STEP) as tiles:
        for (unit, own, is_last), tile, view in tiles:
            with named(f"step {unit.name}"):
                _update(rule, own, view, state)
                uploads.append(tile.publish(after))
            if is_last:
                yield unit, uploads
                uploads = []


def _work(slices: Sequence[ShardSlice]) -> list[_Work]:
    """List the tiles that have something to update."""
    by_unit: dict[int, list[ShardSlice]] = {}
    for part in slices:
        if part.used:
            by_unit.setdefault(id(part.unit), []).append(part)
    work: list[_Work] = []
    for own in by_unit.values():
        unit = own[0].unit
        store = own[0].unit.store
        if store is None or store.on_device or not store.has_grad:
            continue
        tiles = [
            (tile, inside)
            for tile in store.tiles
            if (inside := [part for part in own if tile[0] <= part.start and part.stop <= tile[1]])
        ]
        work += [(store, tile, (unit, inside, tile == tiles[-1][0])) for tile, inside in tiles]
    return work


def _update(rule: UpdateRule, slices: Sequence[ShardSlice], tile: TileView, state: State) -> None:
    assert tile.grad is not None
    if tile.out is not None:
        _fill_uncovered(tile.out, tile.master, [part.span(tile) for part in slices])
    # The optimizer has no entry for these slices. Their state is made from the tile, and taken back after the
    # update.
    on_disk = slices[0].leaf is None
    if on_disk:
        state = defaultdict(dict)
    updates = []
    for part in slices:
        span = part.span(tile)
        leaf = tile.master[span].detach().requires_grad_() if part.leaf is None else part.leaf
        if on_disk and (own := {**part.scalars, **part.tensors_in(tile, state)}):
            state[leaf] = own
        updates.append(
            SliceUpdate(
                part.group, leaf, tile.grad[span], None if tile.out is None else tile.out[span], part.place
            )
        )
    rule.apply(updates, state)
    if on_disk:
        for part, update in zip(slices, updates, strict=True):
            after = state.get(update.leaf, {})
            check_disk_state(type(rule.optimizer).__name__, after, update.leaf)
            _keep_on_disk(part, tile, update.leaf, after)


def _fill_uncovered(out: Tensor, master: Tensor, spans: Sequence[slice]) -> None:
    """Copy the elements that no update will write: padding, and parameters without a gradient."""
    at = 0
    for span in [*spans, slice(out.numel(), out.numel())]:
        if span.start > at:
            out[at : span.start].copy_(master[at : span.start])
        at = span.stop


def check_disk_state(name: str, state: Mapping[str, Any], leaf: Tensor) -> None:
    """Raise OptimizerError for state that the files of ``offload_optimizer`` cannot keep: they have fp32
    numbers, one for each element, and numbers for the whole piece.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            continue
        if not is_elementwise(value, leaf) or not value.is_floating_point():
            raise OptimizerError(
                f"optimizer {name} keeps {key!r}, {value.dtype} of shape {list(value.shape)} for "
                f"{leaf.numel()} elements, but offload_optimizer to NVMe keeps fp32 state of each element: "
                'use "device": "cpu", or an optimizer with fp32 state'
            )


def _keep_on_disk(part: ShardSlice, tile: TileView, leaf: Tensor, after: dict[str, Any]) -> None:
    """Write a slice's state after a step to where the tile keeps it."""
    names = sorted(name for name, value in after.items() if is_elementwise(value, leaf))
    if len(names) > len(tile.state):
        raise RuntimeError(
            f"the optimizer has {len(names)} values per element ({', '.join(names)}), but had "
            f"{len(tile.state)} when its NVMe file was created: set momentum and amsgrad before "
            "zlaunch.initialize"
        )
    for name, region in zip(names, tile.state, strict=False):
        kept = region[part.span(tile)]
        # State that the update has made, or replaced, is not in the tile yet.
        if after[name].data_ptr() != kept.data_ptr():
            kept.copy_(after[name])
    part.scalars = {name: value for name, value in after.items() if name not in names}
    part.on_disk = names


# -- background step --------------------------------------------------------------------------------


class BackgroundStep(StepMethod):
    """Steps the units whose state is in host memory or on disk.

    With ``background``, :meth:`start` returns at once: a thread goes through the units in order while the
    device begins the next forward pass, which waits for each unit as it gets there. Not so where whole
    parameters have to be gathered from the ranks that updated them (stages 1 and 2, several ranks): a gather
    that starts when a rank first touches a parameter could meet another collective of that rank.
    """

    steps_on_device = False

    def __init__(self, units: Sequence[Unit], comm: Comm, background: bool) -> None:
        """Prepare to step ``units``, which may be replaced. ``background``: return before the step ends."""
        self._comm = comm
        self._all_units = units
        gathers = any(not unit.shard_params and unit.stop - unit.start < unit.numel for unit in self._units)
        self._background = background and not gathers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False
        self._arrivals: dict[int, _Arrival] = {}
        """Maps the identity of a unit to its new values."""

    @property
    def _units(self) -> list[Unit]:
        return [unit for unit in self._all_units if self.takes(unit)]

    def takes(self, unit: Unit) -> bool:
        """Tell whether ``unit`` is off the device."""
        return unit.store is None or not unit.store.on_device

    def handles_refresh(self, unit: Unit) -> bool:
        """Tell whether the new values of ``unit`` come without a refresh by the caller."""
        return self._background and self.takes(unit)

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step, or begin it. Raises DiskError if it was done at once."""
        # The device may still run passes that read the old values: no upload starts before their end.
        after = stream_mark(self._comm.device)
        stepped = step_tiles(rule, slices, rule.optimizer.state, after)
        # For all units, before anything is stepped: the script may touch a parameter as soon as this returns.
        self._arrivals = {id(unit): _Arrival() for unit in self._units}
        if not self._background:
            self._run(rule, stepped)
            self.check()
            for arrival in self._arrivals.values():
                arrival.wait()
            return
        for unit in self._units:
            arrival = self._arrivals[id(unit)]
            if unit.store is not None:
                # The next gradient of this unit must not replace the one that the thread still reads.
                unit.store.reader = arrival
            if unit.shard_params:
                unit.updated = arrival
            else:
                unit.await_update(arrival)
        self._thread = make_thread(partial(self._run, rule, stepped), "zlaunch-step", daemon=True)
        self._thread.start()

    def _run(self, rule: UpdateRule, stepped: Iterator[tuple[Unit, list[Pending]]]) -> None:
        try:
            with torch.no_grad():
                for unit, uploads in stepped:
                    self._arrivals[id(unit)].come(uploads)
            rule.end()
        except BaseException as error:
            self._error = error
        # Every unit, also those that had nothing to step or that an error has left out: a pass would wait
        # forever for an arrival that does not come.
        for arrival in self._arrivals.values():
            arrival.come([], self._error)

    def check(self) -> None:
        """Raise what ended a step early."""
        if self._error is not None:
            # The error stays: after an incomplete step, each further call raises it.
            self._told = True
            raise self._error

    def finish(self) -> None:
        """Raise what ended the last step early, if it has not been raised yet: no other step will follow."""
        if self._told:
            return
        self.wait()

    def wait(self) -> None:
        """Wait until the step has ended, uploads included. Raises what ended it early."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        for arrival in self._arrivals.values():
            arrival.synchronize()
        self._arrivals.clear()


class _Arrival(Pending):
    """Represents new values of one unit, on their way to the device."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._uploads: Sequence[Pending] = ()
        self._error: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Tell whether ``wait`` would not block the host."""
        return self._event.is_set()

    def come(self, uploads: Sequence[Pending], error: BaseException | None = None) -> None:
        # The first call counts: uploads that have come are not replaced by the error of a later unit.
        if not self._event.is_set():
            self._uploads = uploads
            self._error = error
            self._event.set()

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise self._error
        for upload in self._uploads:
            upload.wait()

    def synchronize(self) -> None:
        """Block the host until the device has the values, as far as they have come."""
        for upload in self._uploads:
            upload.synchronize()
