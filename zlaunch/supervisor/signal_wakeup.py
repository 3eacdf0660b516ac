"""Wake the main thread when a signal has come to another thread of this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class SignalWakeup:
    """Calls a function after each signal, from a thread of its own.

    The kernel may give a signal to any thread (after SIGSTOP and SIGCONT it often does). Python then runs the
    handler in the main thread, but only once that goes on: a wait for a queue would last to its end.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """Begin. Call it in the main thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(self._reader, wake), daemon=True).start()

    @staticmethod
    def _run(reader: int, wake: Callable[[], object]) -> None:
        while os.read(reader, 512):
            wake()
        os.close(reader)

    def close(self) -> None:
        """End the thread and give back what was set before."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
