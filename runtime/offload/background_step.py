"""Runs the part of an optimizer step that is not on the device, at once or in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Pending
from ..optim.slices import ShardSlice
from ..optim.update_rule import UpdateRule
from ..zero.store import DeviceStore
from ..zero.unit import Unit
from .offloaded_step import step_tiles


class BackgroundStep:
    """Steps the units whose state is in host memory or on disk.

    With ``background``, :meth:`start` returns at once: a thread goes through the units in order while the
    device begins the next forward pass, which waits for each unit as it gets there. Not so where whole
    parameters have to be gathered from the ranks that updated them (stages 1 and 2, several ranks): a gather
    that starts when a rank first touches a parameter could meet another collective of that rank.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, background: bool) -> None:
        """Prepare to step ``units``, which may be replaced. ``background``: return before the step ends."""
        self._comm, self._all_units = comm, units
        gathers = any(not unit.shard_params and unit.stop - unit.start < unit.numel for unit in self._units)
        self._background = background and not gathers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False
        self._arrivals: dict[int, _Arrival] = {}
        """Maps the identity of a unit to its new values."""

    @property
    def _units(self) -> list[Unit]:
        return [unit for unit in self._all_units if not isinstance(unit.store, DeviceStore)]

    by_parameter = False

    def forget(self) -> None:
        """Do nothing: all state is the optimizer's."""

    def own_squares(self) -> list[Tensor]:
        """Return nothing: the stores' gradients make the norm."""
        return []

    def takes(self, unit: Unit) -> bool:
        """Tell whether ``unit`` is off the device."""
        return not isinstance(unit.store, DeviceStore)

    def brings(self, unit: Unit) -> bool:
        """Tell whether the new values of ``unit`` come without a refresh by the caller."""
        return self._background and not isinstance(unit.store, DeviceStore)

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step, or begin it. Raises DiskError if it was done at once."""
        after: torch.cuda.Event | None = None
        if self._comm.device.type == "cuda":
            after = torch.cuda.current_stream(self._comm.device).record_event()
        stepped = step_tiles(rule, slices, rule.optimizer.state, after)
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
                unit.store.reader = arrival
            if unit.shard_params:
                unit.updated = arrival
            else:
                unit.await_update(arrival)
        self._thread = threading.Thread(
            target=self._run, args=(rule, stepped), name="zlaunch-step", daemon=True
        )
        self._thread.start()

    def _run(self, rule: UpdateRule, stepped: Iterator[tuple[Unit, list[Pending]]]) -> None:
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            with torch.no_grad():
                for unit, uploads in stepped:
                    self._arrivals[id(unit)].come(uploads)
            rule.end()
        except BaseException as error:
            self._error = error
        for arrival in self._arrivals.values():
            arrival.come([], self._error)

    def check(self) -> None:
        """Raise what ended a step early."""
        if self._error is not None:
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
        if not self._event.is_set():
            self._uploads, self._error = uploads, error
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
