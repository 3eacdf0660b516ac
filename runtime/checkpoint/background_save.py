"""Writes a save in a thread, from a snapshot, while training goes on."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from ..comm.collectives import Comm
from ..log import fail, warn
from .format.tensor_file import CheckpointError
from .host_channel import HostChannel
from .save import Save
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..offload.transfer import HostLink

_all: WeakSet[BackgroundSave] = WeakSet()


@atexit.register
def _fail_if_unsaved() -> None:
    """End the process with code 1 if a save has failed and the script has not been told."""
    for saves in list(_all):
        if saves.has_unreported_failure:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class BackgroundSave:
    """Writes one save at a time; keeps the memory of its snapshot for the next."""

    def __init__(self, comm: Comm, link: HostLink, *, is_needed: bool = True) -> None:
        """Write by ``comm`` and ``link``. Where saves are not needed, a failure is a warning, said once until
        one ends well.
        """
        self._comm, self._link, self._is_needed, self._has_warned = comm, link, is_needed, False
        self._snapshot: Snapshot | None = None
        self._reserving: threading.Thread | None = None
        self._writing: HostChannel | None = None
        self._polling: HostChannel | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _all.add(self)

    @property
    def has_unreported_failure(self) -> bool:
        """Tell whether a save has failed and no call has raised its error."""
        return self._thread is not None and self._error is not None

    def reserve(self, measure: Callable[[], int]) -> None:
        """Take the memory for snapshots once, beside training; ``measure`` returns its bytes."""
        if self._snapshot is not None:
            return
        self._snapshot = snapshot = Snapshot(self._link)
        try:
            nbytes = measure()
        except CheckpointError:
            return  # a save will say so

        def take() -> None:
            self._use_device()
            with suppress(OSError, MemoryError):  # then the save itself will say so
                snapshot.reserve(nbytes)

        self._reserving = threading.Thread(target=take, name="zlaunch-snapshot", daemon=True)
        self._reserving.start()

    def start(self, save: Save, then: Callable[[Path], None]) -> None:
        """Copy what is to be saved and begin to write it; call ``then`` with the checkpoint's path when it is
        there. Collective. Raises CheckpointError on every rank.
        """
        self._snapshot = self._snapshot or Snapshot(self._link)
        if self._reserving is not None:
            self._reserving.join()
        if self._writing is None:
            self._writing, self._polling = HostChannel(self._comm), HostChannel(self._comm)
        try:
            save.begin(self._snapshot)
        except CheckpointError as error:
            if self._is_needed:
                raise
            self._warn(error)
            return
        self._thread = threading.Thread(
            target=self._finish, args=(save, self._writing, then), name="zlaunch-checkpoint"
        )
        self._thread.start()

    def _use_device(self) -> None:
        """Choose this rank's GPU in the calling thread."""
        if self._comm.device.type == "cuda":
            torch.cuda.set_device(self._comm.device)

    def _finish(self, save: Save, channel: HostChannel, then: Callable[[Path], None]) -> None:
        try:
            self._use_device()
            then(save.finish(channel.exchange))
            self._has_warned = False
        except BaseException as error:
            if not self._is_needed and isinstance(error, CheckpointError):
                self._warn(error)
                return
            self._error = error
            if self._comm.rank == 0:
                fail(f"the checkpoint was not saved: {error}")

    def _warn(self, error: CheckpointError) -> None:
        if self._comm.rank == 0 and not self._has_warned:
            warn(f"in-memory snapshot failed, training continues: {error}")
        self._has_warned = True

    def poll(self) -> None:
        """Raise, on all ranks in one step, what the save failed with. Collective while there is one."""
        if self._thread is None or self._polling is None:
            return
        running, failed = self._polling.any(self._thread.is_alive(), self._error is not None)
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Return when the save has ended. Raises what it failed with."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the memory for snapshots back. Raises as :meth:`wait`."""
        try:
            self.wait()
        finally:
            if self._reserving is not None:
                self._reserving.join()
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None
            self._link.close()
