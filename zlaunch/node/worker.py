"""Start workers and keep their pipes, on the agent's side."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from zlaunch.node import preload
from zlaunch.node.preload import Preloader
from zlaunch.plan.plan import Plan, WorkerPlan
from zlaunch.system.events import LineBuffer
from zlaunch.system.processes import PASSED_SIGNALS

# -- worker -----------------------------------------------------------------------------------------


CHUNK_BYTES = 1 << 18


class Worker:
    """Holds a running worker and what has been seen of it."""

    def __init__(self, plan: WorkerPlan, pid: int, streams: dict[int, str], event_fd: int) -> None:
        self.plan = plan
        self.pid = pid
        """Process id, which is also the id of its process group and its session."""
        self.streams = streams
        """Descriptor -> stdout or stderr."""
        self.event_fd = event_fd
        self.finished_fds: set[int] = set()
        self.events = LineBuffer()
        self.has_left_out = False
        """Whether it has been said that not all events arrive."""
        self.returncode: int | None = None


def _pipes() -> tuple[list[int], list[int]]:
    """Make pipes for stdout, stderr and events; return read ends, which never block, and write ends."""
    pairs = [os.pipe() for _ in range(3)]
    for reader, _ in pairs:
        os.set_blocking(reader, False)
    return [reader for reader, _ in pairs], [writer for _, writer in pairs]


class Batch:
    """Holds the workers of a node that one preloader forks."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        modules: Sequence[str],
        cwd: str,
        user_input: int | None,
        *,
        standby: Preloader | None,
        stays: bool,
    ) -> None:
        """Ask the `standby` of the last attempt for the workers, or a new preloader; rank 0 is to read from
        `user_input`. `stays`: there is to be a standby afterwards. Raises OSError.
        """
        self.plans = plans
        ends = [_pipes() for _ in plans]
        self._readers = [readers for readers, _ in ends]
        # As in spawn(): the preloader inherits the mask, and so do its workers until their bootstrap has
        # handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)
        pipes = [writers for _, writers in ends]
        try:
            if standby is not None:
                self.preloader = standby
                with suppress(OSError):  # it has been killed
                    standby.order(modules, plans, pipes, user_input, standby=stays)
                    return
                standby.close()
            self.preloader = preload.start(plans, pipes, cwd)
            self.preloader.order(modules, plans, pipes, user_input, standby=stays)
        except OSError:
            self._close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            # The agent's own copies: with them open, a worker's output would never end.
            for _, writers in ends:
                for fd in writers:
                    os.close(fd)

    def close(self) -> None:
        """Close the connection and the pipes; workers that were forked end."""
        self.preloader.close()
        self._close()

    def _close(self) -> None:
        for readers in self._readers:
            for fd in readers:
                os.close(fd)

    def workers(self) -> list[Worker] | None:
        """Let the forked workers go, once the preloader's connection can be read; None when it failed."""
        pids = self.preloader.release()
        if pids is None:
            self._close()
            return None
        return [
            Worker(plan, pid, {out: "stdout", err: "stderr"}, events)
            for plan, pid, (out, err, events) in zip(self.plans, pids, self._readers, strict=True)
        ]


def spawn(plan: WorkerPlan, cwd: str, user_input: int | None = None) -> Worker:
    """Start a worker in its own session, with pipes that never block the agent.

    Rank 0 reads from `user_input`, a descriptor. Raises OSError.
    """
    readers, writers = _pipes()
    out_end, err_end, events_end = writers
    own = {"ZLAUNCH_EVENT_FD": str(events_end), "ZLAUNCH_AGENT_PID": str(os.getpid())}
    # They would kill a worker that has no handlers yet; its bootstrap takes them when it has.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)
    try:
        process = subprocess.Popen(
            plan.argv,
            env={**os.environ, **plan.env, **own},
            cwd=cwd,
            stdin=subprocess.DEVNULL if user_input is None or plan.rank else user_input,
            stdout=out_end,
            stderr=err_end,
            pass_fds=(events_end,),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for reader in readers:
            os.close(reader)
        raise OSError(str(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for writer in writers:
            os.close(writer)
    process.returncode = 0  # the agent waits for all its children itself; Popen must not
    out, err, events = readers
    return Worker(plan, process.pid, {out: "stdout", err: "stderr"}, events)


def blames_host(error: OSError) -> bool:
    """Tell whether a worker that could not be started may start on another host."""
    # A program that is no program, or too long arguments, fail on every host.
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in (errno.ENOEXEC, errno.E2BIG)


def why_not_started(error: OSError, worker: WorkerPlan, plan: Plan) -> str:
    """Return what to tell the user about a worker of this node that could not be started."""
    host = plan.nodes[0].host
    if not os.path.isdir(plan.cwd):
        return (
            f"{host}: there is no folder {plan.cwd}: it has to be on every node (a shared file system, or "
            "--workdir DIR)"
        )
    text = f"cannot start rank {worker.rank} on {host}: {error}"
    if os.strerror(errno.EMFILE) in text:
        text += f" (the limit, ulimit -n, is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return text


def read_chunk(fd: int) -> bytes | None:
    """Read a chunk, empty at the end of the file, None when there is nothing now."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


# -- oom --------------------------------------------------------------------------------------------
#
# Read the kernel's counters of processes that it has killed for lack of memory (oom-kill).


OomScope = Literal["run", "host"]
"""Where a process was killed: in the control group of this process, or somewhere on the machine."""

_MACHINE = "proc/vmstat"


def oom_counters(root: Path = Path("/")) -> dict[OomScope, int]:
    """Read the oom-kill counters of this process's control group and of the machine, as far as there are any.

    A group's counter counts the processes in it only, whichever limit was met. Groups above it are not asked:
    they also count what happens to their other members.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if not controllers:
            folder = root / "sys/fs/cgroup"
            name = "memory.events"
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            name = "memory.oom_control"
        else:
            continue
        # A container may see its own group under another path: the nearest that is there is meant then.
        counts = [_count(folder / inner / name) for inner in (group, *group.parents)]
        own.append(next((count for count in counts if count is not None), None))
    counters: dict[OomScope, int] = {}
    if known := [count for count in own if count is not None]:
        counters["run"] = sum(known)
    if (machine := _count(root / _MACHINE)) is not None:
        counters["host"] = machine
    return counters


def _count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def oom_rose(before: Mapping[OomScope, int], after: Mapping[OomScope, int]) -> OomScope | None:
    """Tell where a process was killed for lack of memory between two readings.

    Where the control group counts, the machine's number says nothing: it was a process of another group.
    """
    scope: OomScope = "run" if "run" in after else "host"
    return scope if after.get(scope, 0) > before.get(scope, 0) else None


# -- death ------------------------------------------------------------------------------------------
#
# Say what usually lies behind the death of a worker by a signal.


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
