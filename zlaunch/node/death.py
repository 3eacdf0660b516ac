"""Say what usually lies behind the death of a worker by a signal."""

from __future__ import annotations

import resource
import signal

from zlaunch.node.oom import OomScope


def _cpu_limit() -> str:
    """Name the limit of CPU time, if there is one: the kernel also enforces it with SIGKILL."""
    seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return "" if seconds == resource.RLIM_INFINITY else f", or the CPU time limit of {seconds} s: ulimit -t"


def likely_reason(signum: int, *, oom_killed: OomScope | None) -> str:
    """Return what usually lies behind a death by this signal; `oom_killed` is what the counters say."""
    if signum == signal.SIGKILL and oom_killed == "run":
        return (
            "out of host memory: the kernel has killed for lack of it among this run's processes (oom-kill)"
        )
    if signum == signal.SIGKILL and oom_killed == "host":
        return (
            "killed from outside (kill -9, the batch system), or out of host memory: meanwhile the kernel "
            "has killed some process of this machine for lack of it"
        )
    reasons: dict[int, str] = {
        signal.SIGKILL: f"killed from outside (kill -9, the batch system, a container limit{_cpu_limit()}); "
        "no oom-kill was counted on this host",
        signal.SIGBUS: "often /dev/shm is full: give it more room (docker --shm-size) or use fewer "
        "DataLoader workers",
        signal.SIGSEGV: "a crash in native code; for a Python worker the log has the stacks of all threads, "
        "and `kill -USR2 PID` prints them for a living one",
        signal.SIGABRT: "native code gave up (an assertion, a C++ exception, or NCCL's watchdog); "
        "see the lines above it",
        signal.SIGILL: "a binary built for another CPU",
        signal.SIGFPE: "an integer division by zero in native code",
        signal.SIGTERM: "somebody asked it to stop (kill, the batch system)",
        signal.SIGXCPU: "the CPU time limit (ulimit -t)",
        signal.SIGXFSZ: "the file size limit (ulimit -f)",
    }
    return reasons.get(signum, "")
