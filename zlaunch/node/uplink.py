"""Connect an agent to its launcher: commands in, events out, and how long either may be silent."""

from __future__ import annotations

import os
import select
import time

from zlaunch.node.outbox import Outbox
from zlaunch.node.worker import read_chunk
from zlaunch.system.events import Event, LineBuffer

_IDLE_S = 300.0
"""Seconds that an agent waits for its plan when the launcher has not said how long that may take."""
_PAUSE_S = 86400.0
"""Seconds that a launcher that has been stopped in its terminal (Ctrl-Z) may be silent."""
_GOODBYE_S = 5.0
"""Seconds that a launcher that has hung up may take nothing of the last output."""


class Uplink:
    """Reads commands and writes events; neither of its descriptors ever blocks the agent."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.stdin = stdin
        self.outbox = Outbox(stdout)
        self.idle_s = _IDLE_S
        self.heartbeat_s: float | None = None
        """Seconds of silence allowed; None before the plan; 0 for a local launcher, whose pipe ends."""
        self._heard_at = time.monotonic()
        self._commands = LineBuffer()
        self._paused = False
        os.set_blocking(stdin, False)

    def read(self) -> list[Event] | None:
        """Take the commands that have come; None when the launcher has hung up."""
        chunk = read_chunk(self.stdin)
        if chunk == b"":
            return None
        if chunk:
            self._heard_at, self._paused = time.monotonic(), False
        commands = list(self._commands.feed(chunk or b""))
        for command in commands:
            self._paused = command.get("cmd") == "pause"
            self.idle_s = float(command.get("idle_s", self.idle_s))
        return commands

    def await_plan(self) -> None:
        """Allow the launcher to be silent for as long as it has said, from now on."""
        self.heartbeat_s, self._heard_at = None, time.monotonic()

    def too_silent(self) -> str:
        """Return how long the launcher has been silent, if the present state does not allow it; else ""."""
        silent_s = time.monotonic() - self._heard_at
        if self.heartbeat_s is None:
            return "no plan has come" if silent_s > self.idle_s else ""
        if self._paused:
            hours = _PAUSE_S / 3600
            return f"the launcher has been stopped for {hours:g} hours" if silent_s > _PAUSE_S else ""
        if self.heartbeat_s and silent_s > self.heartbeat_s:
            return f"the launcher has been silent for {self.heartbeat_s:g} s"
        return ""

    def hand_over(self) -> None:
        """Write the rest of the output, for as long as the launcher takes some of it or is heard.

        A launcher on this machine may take its time: its terminal may be halted.
        """
        limit_s = self.heartbeat_s or _PAUSE_S
        moved_at, listening = time.monotonic(), True
        while self.outbox.pending:
            left = moved_at + (_PAUSE_S if self._paused else limit_s) - time.monotonic()
            if left <= 0:
                return
            before = self.outbox.pending
            readable, _, _ = select.select([self.stdin] if listening else [], [self.outbox.fd], [], left)
            self.outbox.flush()
            if self.outbox.pending < before:
                moved_at = time.monotonic()
            if readable and self.read() is None:
                listening, limit_s, self._paused = False, _GOODBYE_S, False
            elif readable:
                moved_at = time.monotonic()


def take_user_input() -> int | None:
    """Return the descriptor of the user's own input, which rank 0 gets, if the launcher has handed it on."""
    fd = int(os.environ.pop("ZLAUNCH_STDIN_FD", "-1"))
    if fd < 0:
        return None
    os.set_inheritable(fd, False)
    return fd
