"""Wait for an agent's file descriptors, each with a handler to call when it is ready."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from zlaunch.node.outbox import Outbox


class Descriptors:
    """Waits for all descriptors at once and calls the handlers of those that are ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call a handler whenever the descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, if it is watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def close(self, fd: int) -> None:
        """Forget a descriptor, and close it."""
        self.unwatch(fd)
        os.close(fd)

    def watch_outbox(self, outbox: Outbox) -> None:
        """Wait for room to write only when there is something to write."""
        waiting = outbox.fd in self._selector.get_map()
        if outbox.pending and not waiting:
            self._selector.register(outbox.fd, selectors.EVENT_WRITE, outbox.flush)
        elif waiting and not outbox.pending:
            self._selector.unregister(outbox.fd)

    def wait(self, timeout_s: float) -> None:
        """Wait for the first ready descriptors, and call their handlers."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map():
                key.data()
