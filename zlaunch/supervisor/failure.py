"""Choose which failure came first and why, and tell the user. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from zlaunch.system.processes import signal_name

ONE_EVENT_S = 1.0
"""Seconds within which failures are one event: the cause may be seen after its consequences."""
LOST_PEER_S = 3.0
"""Seconds of one event where a rank has lost another: that one is ending, slowly where all is busy."""

TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """Says how one rank ended badly."""

    rank: int
    host: str
    time: float
    """When the launcher was told, in seconds by the launcher's clock."""
    kind: Literal["signal", "exit", "exception"]
    returncode: int | None = None
    """Exit code as subprocess has it: negative for a signal; None when it had not ended by itself."""
    exception: str = ""
    reason: str = ""
    traceback: str = ""
    talk: str = ""
    """ "lost" or "failed" where the exception came of talking to other ranks, see peers.talk_of."""
    chose_devices: bool = False
    """True if the script changed CUDA_VISIBLE_DEVICES: a missing GPU is then its own doing."""

    @property
    def exit_code(self) -> int:
        """Return what a shell would show: 128 + n for signal n."""
        if self.returncode is not None and self.returncode < 0:
            return 128 - self.returncode
        return self.returncode or 1


def one_event_s(talk: str) -> float:
    """Return the seconds within which the cause of a failure may be seen; `talk` as a failure has it."""
    return LOST_PEER_S if talk == "lost" else ONE_EVENT_S


def is_port_taken(text: str) -> bool:
    """Tell whether an exception says that another process has the rendezvous port."""
    return any(word in text for word in ("EADDRINUSE", "address already in use", "Address already in use"))


_BAD_DEVICE = (
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "no CUDA-capable device is detected",
    "CUDA-capable device(s) is/are busy or unavailable",
    "all CUDA-capable devices are busy or unavailable",
    "CUDA driver initialization failed",
    "CUDA unknown error",
    "CUDA error: initialization error",
    "CUDA error: system not yet initialized",
    "uncorrectable ECC error",
)
"""What torch and CUDA say where a GPU or its driver is broken, and no script can be to blame."""


def is_bad_device(text: str) -> bool:
    """Tell whether an exception says that a GPU, or its driver, does not work."""
    return any(words in text for words in _BAD_DEVICE)


def choose(failures: Iterable[Failure]) -> Failure:
    """Choose the failure that explains the others.

    Of the failures of the first moment it takes a death by signal, then an error of the script, then an error
    in talking to the others; the earliest of the best. SIGABRT counts as an error: NCCL's watchdog raises it
    in ranks that have lost another.
    """
    ordered = sorted(failures, key=lambda failure: failure.time)
    until = ordered[0].time + one_event_s(ordered[0].talk)
    first = [failure for failure in ordered if failure.time <= until]

    def order(failure: Failure) -> int:
        if failure.kind == "signal" and failure.returncode != -signal.SIGABRT:
            return 0
        return 2 if failure.talk else 1

    return min(first, key=order)


def report(
    failure: Failure, tail: Sequence[str], log_path: str, *, shown: bool = False, others: str = ""
) -> str:
    """Return the one text that ends a failed run.

    `tail` are the last lines of the rank's output; they are left out where the console has `shown` them. The
    text has the cause once: a traceback that is in the output is not repeated. `others`: what became of the
    ranks that this one has lost, where that is known and they have not failed.
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
    # torch.distributed puts the rank before each line; our text about a lost rank is no traceback.
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
    """Leave out the stacks that a user has asked a living worker for; those of a crash stay."""
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


_HINTS = (
    # argparse's words, or those of a parser of the script's own: "ValueError: Unknown config key: local_rank"
    (
        r"[Ee]rror: .*\blocal_rank\b",
        "the script does not know --local_rank; start it with zlaunch --no_local_rank (LOCAL_RANK is set)",
    ),
    (
        r"unrecognized arguments: --num_gpus",
        "--num_gpus stood after the script, so it was the script's: put zlaunch's options before it",
    ),
    (
        r"gloo.*op\.preamble\.length <= op\.nbytes",
        "the ranks called different collectives, or passed tensors of different sizes. Every rank must make "
        "the same calls in the same order: look for a call under `if rank == 0`, and for shapes or dtypes "
        "that differ",
    ),
)
"""What a line of the output matches -> what the user can do."""


def _hint(tail: Sequence[str]) -> str:
    found = (hint for pattern, hint in _HINTS if any(re.search(pattern, line) for line in tail))
    return next(found, "")
