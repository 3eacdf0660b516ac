"""The guard: a tiny process beside each agent that cleans up when the agent itself is killed with SIGKILL.

PDEATHSIG takes the workers down then, but not what they forked. The guard only reads a pipe whose other end
the agent alone holds; the end of file without an "ok" is the agent's death.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from zlaunch.launch.processes import sweep


class Guard:
    """The agent's side. Fork it before threads, workers, or other descriptors exist."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _guard(reader)
        os.close(reader)

    def tell(self, word: str, value: str | int = "") -> None:
        """`run ID` and `session N` say what to clean; `ok` says that there is nothing to do."""
        try:
            os.write(self._writer, f"{word} {value}\n".encode("utf-8", "surrogateescape"))
        except OSError:  # somebody killed the guard; the run goes on without
            pass


def _guard(reader: int) -> NoReturn:
    """The guard's whole life."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stdio in (0, 1, 2):
            os.dup2(null, stdio)
        _disguise()
        text = b""
        while chunk := os.read(reader, 65536):
            text += chunk
        words = [line.partition(" ") for line in text.decode("utf-8", "surrogateescape").splitlines()]
        values = {word: value for word, _, value in words}
        sessions = {int(value) for word, _, value in words if word == "session"}
        if "ok" not in values and "run" in values:
            sweep(values["run"], sessions)
    finally:
        os._exit(0)


def _disguise() -> None:
    """Take another name and blank the inherited environment.

    Whoever kills the agent by its command line must not hit its guard, and a guard inside another zlaunch run
    must not look like a process of that run.
    """
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    except (OSError, ValueError):
        return
    name = b"zguard"
    if 0 < arg_start < arg_end - len(name):
        ctypes.memset(arg_start, 0, arg_end - arg_start)
        ctypes.memmove(arg_start, name, len(name))
    if 0 < env_start < env_end:
        ctypes.memset(env_start, 0, env_end - env_start)
