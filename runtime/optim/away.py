"""The part of an optimizer step that happens away from the device, at once or in the background."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain

import torch

from ..comm import DONE, Comm, Pending
from ..offload.link import settled
from ..offload.place import Offload, Place
from ..zero.unit import Unit
from .lanes import Stepped, step_in_host, step_on_disk
from .rule import Rule
from .runs import Run


class Away:
    """Steps the units whose state is in host memory or on disk.

    With ``background``, :meth:`start` returns at once: a thread goes through the units in order while the
    device begins the next forward pass, which waits for each unit as it gets there. All-gathers of what
    ranks have updated are then issued by the thread that waits, always in the order of the units, since all
    ranks must issue them alike.
    """

    def __init__(self, offload: Offload, units: Sequence[Unit], comm: Comm, background: bool) -> None:
        self._offload, self._comm, self._background = offload, comm, background
        self._units = [unit for unit in units if unit.state_place is not Place.DEVICE]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._arrivals: list[_Arrival] = []

    def brings(self, unit: Unit) -> bool:
        """Whether the new values of ``unit`` come without a refresh by the caller."""
        return self._background and unit.state_place is not Place.DEVICE

    def start(self, rule: Rule, runs: Sequence[Run]) -> None:
        """Do the step, or begin it. Raises DiskError if it was done at once."""
        after = self._offload.link.mark()
        stepped = chain(
            step_in_host(self._offload, rule, runs, rule.optimizer.state, after),
            step_on_disk(self._offload, rule, runs, after),
        )
        if not self._background:
            for _, uploads in stepped:
                for upload in uploads:
                    upload.wait()
            rule.end()
            return
        arrivals = {id(unit): _Arrival() for unit in self._units}
        order = _InOrder([unit for unit in self._units if not unit.shard_params], arrivals, self._comm)
        self._arrivals = list(arrivals.values())
        for unit in self._units:
            if unit.gradient_home is not None:
                unit.gradient_home.reader = arrivals[id(unit)]
            if unit.shard_params:
                unit.updated = arrivals[id(unit)]
            else:
                unit.await_update(_Refresh(order, unit))
        self._thread = threading.Thread(
            target=self._run, args=(rule, stepped, arrivals), name="zlaunch-step", daemon=True
        )
        self._thread.start()

    def _run(self, rule: Rule, stepped: Stepped, arrivals: dict[int, _Arrival]) -> None:
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            with torch.no_grad():
                for unit, uploads in stepped:
                    arrivals[id(unit)].come(uploads)
            rule.end()
        except BaseException as error:
            self._error = error
        for arrival in arrivals.values():
            arrival.come([], self._error)

    def wait(self) -> None:
        """Return when the step has ended, uploads included. Raises what ended it early."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        for arrival in self._arrivals:
            arrival.settle()
        self._arrivals.clear()


class _Arrival:
    """New values of one unit, on their way."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._uploads: Sequence[Pending] = ()
        self._error: BaseException | None = None

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

    def settle(self) -> None:
        """Block the host until the device has the values."""
        for upload in self._uploads:
            settled(upload)


class _InOrder:
    """Gathers what the ranks have updated, unit after unit."""

    def __init__(self, units: Sequence[Unit], arrivals: dict[int, _Arrival], comm: Comm) -> None:
        self._units, self._arrivals, self._comm = list(units), arrivals, comm
        self._pending: dict[int, Pending] = {}
        self._next = 0

    def wait_for(self, unit: Unit) -> None:
        while id(unit) not in self._pending:
            following = self._units[self._next]
            self._arrivals[id(following)].wait()
            pending = DONE
            if following.stop - following.start < following.numel:
                with torch.no_grad():
                    own = following.full[following.start : following.stop]
                    pending = self._comm.all_gather(following.full, own)
            self._pending[id(following)] = pending
            self._next += 1
        self._pending[id(unit)].wait()


class _Refresh:
    """The wait of one unit that stays FULL."""

    def __init__(self, order: _InOrder, unit: Unit) -> None:
        self._order, self._unit = order, unit

    def wait(self) -> None:
        self._order.wait_for(self._unit)
