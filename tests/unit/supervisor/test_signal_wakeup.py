"""Test that a signal wakes the main thread whichever thread has got it."""

from __future__ import annotations

import queue
import signal
import threading

from tests.limits import LIMIT_S
from zlaunch.supervisor.signal_wakeup import SignalWakeup


def test_a_signal_that_another_thread_gets_ends_the_wait() -> None:
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _frame: seen.append(signum))
    wakeup = SignalWakeup(lambda: events.put("wake"))
    other = threading.Event()
    thread = threading.Thread(target=other.wait)
    thread.start()
    try:
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        assert events.get(timeout=LIMIT_S) == "wake" and seen == [signal.SIGUSR1]
    finally:
        other.set()
        thread.join()
        wakeup.close()
        signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1, "what was set before is set again"
