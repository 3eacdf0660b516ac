"""Write the agent's events: they are queued in memory and never block it."""

from __future__ import annotations

import os

from zlaunch.system.events import Event, encode, encode_output

_FULL_BYTES = 8 << 20


class Outbox:
    """Writes to the launcher's pipe. When the launcher is gone, all that is put in is dropped; see `lost`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lost = False
        self._pending = bytearray()
        os.set_blocking(fd, False)

    @property
    def pending(self) -> int:
        """Return the bytes that wait for room in the pipe."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Tell whether so much waits that the workers' output had better stay in their own pipes."""
        return len(self._pending) >= _FULL_BYTES

    def put(self, event: Event) -> None:
        """Queue an event and write what the pipe takes."""
        self._send(encode(event))

    def put_output(self, rank: int, stream: str, data: bytes) -> None:
        """Queue what a worker has printed, and write what the pipe takes."""
        self._send(encode_output(rank, stream, data))

    def _send(self, data: bytes) -> None:
        if not self.lost:
            self._pending += data
            self.flush()

    def flush(self) -> None:
        """Write until the queue is empty or the pipe is full."""
        try:
            while self._pending:
                with memoryview(self._pending)[: 1 << 20] as part:
                    written = os.write(self.fd, part)
                del self._pending[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True
            self._pending.clear()
