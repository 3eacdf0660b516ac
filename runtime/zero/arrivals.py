"""Units on their way to the device from where they rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..comm.pending import Pending
from ..offload.disk_shard import Reading

if TYPE_CHECKING:
    from .unit import Unit


class UploadAndGather:
    """A unit on its way from host memory: to this device, and behind that to all ranks."""

    def __init__(self, upload: Pending, gather: Pending) -> None:
        self._upload, self._gather = upload, gather

    def wait(self) -> None:
        self._upload.wait()
        self._gather.wait()


class ReadAndGather:
    """A unit on its way from disk; the collective starts when somebody needs it, in the blocks' order."""

    def __init__(self, unit: Unit, reading: Reading) -> None:
        self._unit, self._reading = unit, reading

    def wait(self) -> None:
        pending = self._unit.gather_from(self._reading.wait())
        self._reading.release()
        pending.wait()
