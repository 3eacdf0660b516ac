"""Judge the events of an attempt: when to stop it, which failure to tell, what the exit code is.

Agents only report. The launcher judges by the order and the time in which the reports arrive there: the
clocks of hosts may differ.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zlaunch.plan.checks import LAUNCHER_OPTIONS
from zlaunch.plan.plan import Plan, shown_host
from zlaunch.supervisor.end import SAVED_CODE, End, Slot
from zlaunch.supervisor.nodes import LostNodeProcesses
from zlaunch.supervisor.run_files import log_path
from zlaunch.system.messages import Exited, Raised
from zlaunch.system.processes import signal_name
from zlaunch.view.console import Console

# -- failure ----------------------------------------------------------------------------------------
#
# Choose which failure came first and why, and tell the user. Pure.


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
    ranks that this one has lost, where that is known and they have not failed. It leads the text.
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
        text = [f"zlaunch: {others}", f"  rank {failure.rank} on {failure.host} failed after that: it {how}"]
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
    text += [f"  hint: {hint}" for hint in _hints(tail)]
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
    # the words of argparse, click, typer, absl and fire, and of a parser of the script's own: "ValueError:
    # Unknown config key: local_rank"
    (
        r"(?i)((?<!attribute)error: |no such option|could not consume|unknown).*\blocal_rank\b",
        "the script does not know --local_rank; start it with zlaunch --no_local_rank (LOCAL_RANK is set)",
    ),
    (
        r"cannot import name '\w+' from 'deepspeed\b",
        "zlaunch's deepspeed does not have this name: docs/migrating/deepspeed-missing.md says what to use; "
        "--compat none uses an installed DeepSpeed",
    ),
    (
        r"not used by the HfArgumentParser: .*'--(config|deepspeed_config)[='\"]",
        "a script with a Hugging Face Trainer takes --deepspeed FILE, not --config",
    ),
    (
        r"FileNotFoundError: .*checkpoint-\d+/trainer_state\.json",
        "this checkpoint-N does not exist, or is incomplete: a worker was killed while it saved. To resume "
        "from the newest complete one, call "
        "trainer.train(resume_from_checkpoint=zlaunch.resume_dir(output_dir))",
    ),
    (
        r"gloo.*op\.preamble\.length <= op\.nbytes",
        "the ranks called different collectives, or passed tensors of different sizes. Every rank must make "
        "the same calls in the same order: look for a call under `if rank == 0`, and for shapes or dtypes "
        "that differ",
    ),
)
"""What a line of the output matches -> what the user can do."""


_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_CONFIG_OPTIONS = ("config", "deepspeed", "deepspeed_config")


def _hints(tail: Sequence[str]) -> list[str]:
    """Return what the user can do about the last lines of a rank's output."""
    hints = [hint for pattern, hint in _HINTS if any(re.search(pattern, line) for line in tail)][:1]
    unknown = next((found[1] for line in reversed(tail) if (found := _UNKNOWN.search(line))), "")
    for word in unknown.split():
        option = word.partition("=")[0]
        name = option[2:].replace("-", "_")
        if not option.startswith("--"):
            continue
        if name in LAUNCHER_OPTIONS:
            hints.append(
                f"{option} stands after the script and went to it; zlaunch's options go before the script"
            )
        elif name in _CONFIG_OPTIONS:
            hints.append(
                f"the script does not know {option}: add it to the parser, for example with "
                "zlaunch.add_config_arguments(parser)"
            )
    return hints


# -- verdict ----------------------------------------------------------------------------------------


_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Outcome:
    """Says how a run ended."""

    code: int
    """The launcher's exit code."""
    signum: int = 0
    """The signal that the launcher was stopped by."""
    lost: frozenset[str] = frozenset()
    """Nodes that are gone."""
    died: frozenset[str] = frozenset()
    """Lost nodes whose agent ended without a word: what it has started may be left there."""
    port_taken: bool = False
    """Tells whether nothing was wrong but the rendezvous port."""
    save_asked: bool = False
    """Tells whether the workers were asked to save and stop."""
    saved: bool = False
    """Tells whether the workers have saved and want to be started again, or have saved when a signal stopped
    the run.
    """
    regroups: bool = False
    """Tells whether the attempt was ended for one with nodes that are back."""
    refused_by: tuple[str, ...] = ()
    """Hosts that could not take part, or could not start a worker."""
    refused_slots: tuple[Slot, ...] = ()
    """Slots whose GPU is missing, or did not work at the start."""
    is_final: bool = False
    """Tells whether another attempt would be refused too."""
    started: bool = True
    """Tells whether the nodes have got a plan."""
    vanished: bool = False
    """Tells whether the agents of all nodes are gone without a word."""
    left: Mapping[str, LostNodeProcesses] = field(default_factory=dict, compare=False)
    """What lost nodes may still run, by host."""

    @property
    def is_refused(self) -> bool:
        """Tell whether hosts or slots are to blame, which may be well after a while."""
        return bool(self.refused_by or self.refused_slots)

    @property
    def end(self) -> End:
        """Return the end with its cause."""
        if self.signum:
            return End(self.code, "stopped")
        if self.is_refused:
            return End(self.code, "host refused", self.refused_by, self.refused_slots)
        if self.vanished:
            return End(self.code, "lost")
        if self.saved:
            return End(self.code, "saved")
        return End(self.code, "failed" if self.code else "finished")


class Verdict:
    """Judges the failures of one attempt."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self.failures: dict[int, Failure] = {}
        self.errors: list[str] = []
        self.agent_code: int | None = None
        """The exit code where an agent, and no worker, ended the run."""
        self.lost: set[str] = set()
        self.died: set[str] = set()
        self.left: dict[str, LostNodeProcesses] = {}
        self.refused_by: list[str] = []
        self.has_progressed = False
        """Whether a worker has reported a step or saved."""
        self._slots: dict[int, Slot] = {
            worker.rank: (node.host, worker.slot)
            for node in plan.nodes
            for worker in node.workers
            if worker.slot is not None
        }
        self.stop_at: float | None = None
        """When the other workers are to be stopped (monotonic seconds): a failure has been seen, and a better
        cause may show up until then.
        """
        self.may_have_saved = False
        """Tells whether the workers were asked to save or said so; else the code may be any script's."""
        self._saved = False
        self._tails: dict[int, bytes] = {}
        self._ended_well: list[tuple[int, str]] = []
        """Rank and host of workers that have ended with code 0, in that order."""

    def output(self, rank: int, data: bytes) -> None:
        """Keep the end of a rank's output for the report."""
        self._tails[rank] = (self._tails.get(rank, b"") + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def exception(self, event: Raised) -> None:
        """Record an uncaught exception: the exit code will follow."""
        now = time.monotonic()
        found = Failure(
            event.rank,
            event.host,
            now,
            "exception",
            exception=str(event.exception),
            traceback=str(event.traceback),
            talk=str(event.talk),
            chose_devices=event.chose_devices is True,
        )
        self.failures.setdefault(event.rank, found)
        self._stop_by(now + one_event_s(found.talk))

    def exit(self, event: Exited) -> None:
        """Record a worker's end."""
        now = time.monotonic()
        code = event.returncode
        known = self.failures.get(event.rank)
        if event.after_stop:
            return  # our own doing
        if code == SAVED_CODE and self.may_have_saved and known is None:
            self._saved = True
            return
        if known is not None:
            known = replace(known, returncode=code or None, reason=event.reason)
        elif code != 0:
            kind: Literal["signal", "exit"] = "signal" if code < 0 else "exit"
            known = Failure(event.rank, event.host, now, kind, returncode=code, reason=event.reason)
        else:
            self._ended_well.append((event.rank, event.host))
            return
        self.failures[event.rank] = known
        # A failed collective says that another rank failed: wait for that one. Anything else is a cause.
        if not known.talk:
            self._stop_by(now)

    def _stop_by(self, moment: float) -> None:
        self.stop_at = moment if self.stop_at is None else min(self.stop_at, moment)

    def outcome(
        self,
        signum: int,
        *,
        save_asked: bool,
        saved: bool = False,
        regroups: bool = False,
        vanished: bool = False,
    ) -> Outcome:
        """Say what went wrong, if anything, and return how the attempt ended. `saved`: the run has saved
        since it was asked to, or was stopped; `vanished`: no agent is left that would have said so.
        """
        found = Outcome(
            0,
            lost=frozenset(self.lost),
            died=frozenset(self.died),
            save_asked=save_asked,
            left=self.left,
            vanished=vanished and not self.failures,
            refused_by=() if self.failures else tuple(self.refused_by),
        )
        if signum:
            self._console.message(f"stopped by {signal_name(signum)}")
            return replace(found, code=128 + signum, signum=signum, saved=saved)
        if regroups and not self.failures and not self.errors:
            return replace(found, code=1, regroups=True)
        for error in self.errors:
            self._console.error(error)
        code = self.agent_code or (1 if self.errors else 0)
        port_taken = False
        if self.failures:
            first = choose(self.failures.values())
            shown = self._console.shows(first.rank)
            self._console.text(
                report(
                    replace(first, host=shown_host(first.host)),
                    self._tail(first.rank),
                    str(log_path(self._plan.run_dir, first.rank)),
                    shown=shown,
                    others=self._others(),
                )
            )
            code = first.exit_code
            port_taken = is_port_taken(first.exception)
            if self._device_refused(first):
                found = replace(found, refused_slots=self._refused_slots())
        elif self._saved and not code:
            self._console.message("the run has saved, as it was asked to, and wants to be started again")
            return replace(found, code=SAVED_CODE, save_asked=True, saved=True)
        return replace(found, code=code, port_taken=port_taken)

    def _device_refused(self, failure: Failure) -> bool:
        """Tell whether a GPU that the node has reported did not work at the start: another one may do."""
        at_start = not self.has_progressed and failure.rank in self._slots
        return at_start and not failure.chose_devices and is_bad_device(failure.exception)

    def _refused_slots(self) -> tuple[Slot, ...]:
        """Return the slots of all ranks whose GPU did not work."""
        ranks = sorted(rank for rank, failure in self.failures.items() if self._device_refused(failure))
        return tuple(self._slots[rank] for rank in ranks)

    def _others(self) -> str:
        """Say what became of ranks that others may have lost although they have not failed."""
        if self.lost:
            return f"the ranks of {', '.join(map(shown_host, sorted(self.lost)))} are gone, see above"
        if self._ended_well:
            rank, host = self._ended_well[0]
            more = len(self._ended_well) - 1
            who = f"rank {rank} on {shown_host(host)}" + (f" and {more} more" if more else "")
            return (
                f"{who} ended with exit code 0 while others still ran: the script returned early on "
                f"{'these ranks' if more else 'this rank'}"
            )
        return ""

    def _tail(self, rank: int) -> Sequence[str]:
        """Return the last lines, each as a terminal would show it: what a bar has overwritten is gone."""
        text = self._tails.get(rank, b"").decode("utf-8", "replace").replace("\r\n", "\n")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        return [line for line in lines if line.strip()][-TAIL_LINES:]
