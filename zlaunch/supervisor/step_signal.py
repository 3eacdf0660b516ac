"""Take a SIGTERM that SLURM has sent to the agents for one of the launcher's own.

Note [SLURM's signals]: at the start of a partition's GraceTime SLURM sends SIGTERM only to a job's steps. The
agents run in steps, the launcher runs in the batch shell. At the end of GraceTime, at the time limit and
after scancel, SLURM sends SIGTERM to both, in any order. So an agent reports its SIGTERM, and the launcher
sends itself the same signal, once, whatever it does at that time. None of these signals counts as a second
one of the user, which would kill the workers while they save.
"""

from __future__ import annotations

import signal
import threading

_REPEATED = 2
"""SIGTERMs that follow an agent's report: the launcher's copy, and SLURM's at the end of GraceTime."""


class StepSignal:
    """Counts the SIGTERMs that are SLURM's: see Note [SLURM's signals]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_come = False
        self._expected = 0

    def relay(self, signum: int) -> None:
        """Send this process a signal that an agent has got. Reports of other agents change nothing."""
        with self._lock:
            has_handler = callable(signal.getsignal(signum))
            if self._has_come or not has_handler:  # without one, the run has ended or is none
                return
            self._has_come = True
            self._expected = _REPEATED
        # The main thread's handler acts. Another thread would not interrupt what the main thread waits for.
        signal.pthread_kill(threading.main_thread().ident or 0, signum)

    def is_expected(self, signum: int) -> bool:
        """Tell whether SLURM has sent a signal that came to this process, and count it."""
        if signum != signal.SIGTERM or not self._expected:  # no lock: a signal handler calls this
            return False
        self._expected -= 1
        return True


STEP_SIGNAL = StepSignal()
"""The signals of this process."""
