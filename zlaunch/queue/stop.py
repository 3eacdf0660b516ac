"""Stop launchers of the queue: ask, ask again, kill. Every stop ends, also that of a launcher that hangs.

Note [A stop escalates]
SIGTERM has the launcher stop its workers within the grace period. One that has not ended _PATIENCE_S seconds
after that gets SIGCONT (it may have been suspended) and a second SIGTERM, with which it kills at once. After
another _PATIENCE_S seconds it is killed, and so is what it leaves on this machine. Then the slots are free.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from zlaunch.queue.lost import grace_s, run_id
from zlaunch.queue.store import Job
from zlaunch.system.processes import Process, kill, sweep

_PATIENCE_S = 10.0


@dataclass(slots=True)
class Stops:
    """Remembers the stops of one daemon. A daemon that follows begins to count anew."""

    _asked_at: dict[tuple[int, int], float] = field(default_factory=dict)
    """Job and attempt -> when it was first asked to end (monotonic seconds)."""
    _steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """Job and attempt -> how many of the steps it has had."""

    def ask(self, job: Job, process: Process) -> None:
        """Ask a launcher for the first time."""
        kill(process, signal.SIGTERM)
        self.watch(job)

    def watch(self, job: Job) -> None:
        """Count from now for a launcher that somebody has asked."""
        self._asked_at.setdefault((job.id, job.attempt), time.monotonic())

    def insist(self, job: Job, process: Process) -> str | None:
        """Take the next step where it is time for it; return what to say of it."""
        self.watch(job)
        key = job.id, job.attempt
        done = self._steps.get(key, 0)
        if self.next_s(job) > 0:
            return None
        self._steps[key] = done + 1
        if done == 0:
            kill(process, signal.SIGCONT)
            kill(process, signal.SIGTERM)
            return "its launcher does not end: asked again"
        kill(process, signal.SIGKILL)
        if name := run_id(job):
            sweep(name)
        return "its launcher does not end: killed"

    def next_s(self, job: Job) -> float:
        """Return the seconds until the next step of a stop."""
        key = job.id, job.attempt
        steps = self._steps.get(key, 0) + 1
        due = self._asked_at.get(key, time.monotonic()) + grace_s(job) + steps * _PATIENCE_S
        return due - time.monotonic()

    def forget(self, job_id: int) -> None:
        """Forget a job that has ended."""
        self._asked_at = {key: at for key, at in self._asked_at.items() if key[0] != job_id}
        self._steps = {key: count for key, count in self._steps.items() if key[0] != job_id}
