"""A worker process as its agent sees it: how it is started, and its pipes."""

from __future__ import annotations

import os
import subprocess

from zlaunch.launch.events import LineBuffer
from zlaunch.launch.plan import WorkerPlan

CHUNK_BYTES = 1 << 16


class Worker:
    """A running worker and what has been seen of it."""

    def __init__(self, plan: WorkerPlan, pid: int, streams: dict[int, str], event_fd: int) -> None:
        self.plan = plan
        self.pid = pid
        """Also its process group and its session."""
        self.streams = streams
        """Descriptor -> stdout or stderr."""
        self.event_fd = event_fd
        self.finished_fds: set[int] = set()
        self.events = LineBuffer()
        self.returncode: int | None = None
        self.exception: str | None = None


def spawn(plan: WorkerPlan, cwd: str) -> Worker:
    """Start a worker in a session of its own, with pipes that never block the agent. Raises OSError."""
    pipes = [os.pipe() for _ in range(3)]
    (out, out_end), (err, err_end), (events, events_end) = pipes
    own = {"ZLAUNCH_EVENT_FD": str(events_end), "ZLAUNCH_AGENT_PID": str(os.getpid())}
    try:
        process = subprocess.Popen(
            plan.argv,
            env={**os.environ, **plan.env, **own},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out_end,
            stderr=err_end,
            pass_fds=(events_end,),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for reader, _ in pipes:
            os.close(reader)
        raise OSError(str(error)) from error
    finally:
        for _, writer in pipes:
            os.close(writer)
    process.returncode = 0  # the agent waits for all its children itself; Popen must not
    for reader, _ in pipes:
        os.set_blocking(reader, False)
    return Worker(plan, process.pid, {out: "stdout", err: "stderr"}, events)


def read_chunk(fd: int) -> bytes | None:
    """A chunk, empty at the end of the file, None when there is nothing now."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
