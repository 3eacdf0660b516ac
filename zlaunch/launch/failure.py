"""Which failure came first, why, and how to tell the user. Pure."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from zlaunch.node.oom import OomScope

SETTLE_S = 1.0
"""Failures this close together are one event: the cause may be seen after its consequences."""

TAIL_LINES = 20

SAVED_CODE = 75
"""Exit code of a worker that has saved and ended because it was asked to: "start me again" (EX_TEMPFAIL). The
runtime has the same number.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended badly."""

    rank: int
    host: str
    time: float
    """When the launcher was told, in seconds by its own clock."""
    kind: Literal["signal", "exit", "exception"]
    returncode: int | None = None
    """As subprocess has it: negative for a signal; None when it had not ended by itself."""
    exception: str = ""
    reason: str = ""
    traceback: str = ""
    talk: str = ""
    """ "lost" or "failed" where the exception came of talking to other ranks, see peers.talk_of."""

    @property
    def exit_code(self) -> int:
        """What a shell would show: 128 + n for signal n."""
        if self.returncode is not None and self.returncode < 0:
            return 128 - self.returncode
        return self.returncode or 1


def is_port_taken(text: str) -> bool:
    """An exception that says that somebody else has the rendezvous port."""
    return any(word in text for word in ("EADDRINUSE", "address already in use", "Address already in use"))


def choose(failures: Iterable[Failure]) -> Failure:
    """The one that explains the others.

    Among those that belong to the first moment: a death by signal, then an error of its own, then an error in
    talking to the others; the earliest of the best. SIGABRT counts as an error: NCCL's watchdog raises it in
    ranks that have lost another.
    """
    ordered = sorted(failures, key=lambda failure: failure.time)
    first = [failure for failure in ordered if failure.time <= ordered[0].time + SETTLE_S]

    def order(failure: Failure) -> int:
        if failure.kind == "signal" and failure.returncode != -signal.SIGABRT:
            return 0
        return 2 if failure.talk else 1

    return min(first, key=order)


def signal_name(signum: int) -> str:
    """SIGKILL for 9; the number where there is no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _cpu_limit() -> str:
    """Name the limit of CPU time, if there is one: the kernel enforces it with the same signal."""
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


def report(
    failure: Failure, tail: Sequence[str], log_path: str, *, shown: bool = False, others: str = ""
) -> str:
    """Return the one text that ends a failed run.

    `tail` are the last lines of the rank's output; they are left out where the console has `shown` them. The
    cause stands there once: a traceback that the output has is not told again. `others`: what became of the
    ranks that this one has lost, where that is known and no failure of theirs.
    """
    tail = without_stacks(tail)
    code = failure.returncode
    if code is None:
        how = "raised an exception"
    elif code < 0:
        how = f"was killed by {signal_name(-code)} (exit code {failure.exit_code})"
    else:
        how = f"exited with code {code}"
    text = [f"zlaunch: rank {failure.rank} on {failure.host} failed first: it {how}"]
    if failure.talk == "lost" and others:
        text = [f"zlaunch: rank {failure.rank} on {failure.host} has lost other ranks: {others}"]
    if failure.reason:
        text.append(f"  likely reason: {failure.reason}")
    last = failure.exception.rpartition("\n")[2].strip()
    # torch.distributed puts the rank before each line; our own words about a lost rank are no traceback.
    told = bool(last) and any(
        line.strip().endswith(last) and not line.startswith("zlaunch: ") for line in tail
    )
    traceback = failure.traceback.rstrip("\n").splitlines()
    lines = [] if shown else list(tail)
    if failure.exception and not told and traceback:
        lines += traceback[-TAIL_LINES:]
    elif failure.exception and not lines:
        text.append("  exception: " + failure.exception.replace("\n", "\n    "))
    if failure.talk == "lost" and not others:
        text.append("  it has only lost another rank: what that one has printed says why")
    if hint := _hint(tail):
        text.append(f"  hint: {hint}")
    if lines:
        text.append(f"  last lines of rank {failure.rank}:")
        text += [f"    | {line}" for line in lines]
    text.append(f"  full log: {log_path}")
    return "\n".join(text)


def without_stacks(lines: Sequence[str]) -> list[str]:
    """Leave out the stacks that somebody has asked a living worker for; those of a crash stay."""
    kept: list[str] = []
    in_stacks = crashed = False
    for line in lines:
        crashed = crashed or line.startswith("Fatal Python error")
        starts = line.endswith("(most recent call first):") and line.startswith(
            ("Thread 0x", "Current thread")
        )
        in_stacks = not crashed and (starts or (in_stacks and line.startswith("  ")))
        if not in_stacks:
            kept.append(line)
    return kept


def _hint(tail: Sequence[str]) -> str:
    if any("unrecognized arguments:" in line and "--local_rank" in line for line in tail):
        return (
            "the script does not know --local_rank; start it with zlaunch --no_local_rank (LOCAL_RANK is set)"
        )
    if any("unrecognized arguments: --num_gpus" in line for line in tail):
        return "--num_gpus stood after the script, so it was the script's: put zlaunch's options before it"
    return ""
