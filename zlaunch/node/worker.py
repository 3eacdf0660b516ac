"""Start workers and keep their pipes, on the agent's side."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from zlaunch.node import preload
from zlaunch.node.preload import Preloader
from zlaunch.plan.plan import Plan, WorkerPlan
from zlaunch.system.events import LineBuffer
from zlaunch.system.processes import PASSED_SIGNALS

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
