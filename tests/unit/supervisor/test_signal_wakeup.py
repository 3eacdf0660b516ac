"""Test that a signal wakes the main thread whichever thread has got it."""

from __future__ import annotations

import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.limits import FOR_EVER_S, LIMIT_S, wait_until
from tests.unit.supervisor.test_controller import Scene
from zlaunch.supervisor import controller
from zlaunch.supervisor.controller import SignalWakeup


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


class _Queue(queue.SimpleQueue[Any]):
    """The controller's queue. Once the main thread waits here for hours, another thread gets SIGINT."""

    sent: threading.Thread | None = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is None or timeout < LIMIT_S:
            return super().get(timeout=timeout)
        if self.sent is None:
            self.sent = threading.Thread(target=self._send, args=(threading.get_native_id(),))
            self.sent.start()
        try:
            return super().get(timeout=LIMIT_S)
        except queue.Empty:
            raise AssertionError("the signal has not ended the wait") from None

    def _send(self, waiting: int) -> None:
        """Wait until the main thread is blocked for good, then get the signal.

        Asleep is not enough: it may wait for the interpreter lock. A thread that has not run while this one
        slept, without that lock, waits for the queue.
        """
        status = Path(f"/proc/self/task/{waiting}/status")
        before = ""

        def stands() -> bool:
            nonlocal before
            lines = status.read_text().splitlines()
            now = "".join(line for line in lines if line.startswith(("State", "voluntary", "nonvoluntary")))
            same = now == before and "S (sleeping)" in now
            before = now
            time.sleep(0.1)
            return same

        wait_until(stands, "the main thread waits")
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def test_a_stop_does_not_wait_for_the_end_of_the_controllers_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents are deaf: the run ends by its deadline, of which only the signal's handler knows."""
    monkeypatch.setattr(controller, "adopt_orphans", lambda: None)
    monkeypatch.setattr(controller, "_LONGEST_WAIT_S", FOR_EVER_S)
    monkeypatch.setattr(controller, "_MARGIN_S", 0.0)
    scene = Scene(tmp_path)
    scene.controller.starting.clear()
    scene.controller.queue = waiting = _Queue()
    for agent in scene.agents:
        monkeypatch.setattr(agent, "send", agent.told.append)
        agent.patience_s = 2 * LIMIT_S  # its end would end the wait, too
    outcome = scene.run()
    assert waiting.sent is not None
    assert outcome.code == 130 and outcome.lost == {"n0", "n1"}
