"""Connect an agent to its launcher: commands in, events out, and how long either may be silent."""

from __future__ import annotations

import os
import select

from zlaunch.node.lease import Lease
from zlaunch.node.outbox import Outbox
from zlaunch.node.worker import read_chunk
from zlaunch.system import boot_clock
from zlaunch.system.events import Event, LineBuffer

_IDLE_S = 300.0
"""Seconds that an agent waits for its plan when the launcher has not said how long that may take."""
_HALTED_S = 86400.0
"""Seconds that a launcher on this machine may take nothing of the last output: its terminal may be halted."""
_GOODBYE_S = 5.0
"""Seconds that a launcher that has hung up may take nothing of the last output."""


class Uplink:
    """Reads commands and writes events; neither of its descriptors ever blocks the agent."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.stdin = stdin
        self.outbox = Outbox(stdout)
        self.idle_s = _IDLE_S
        self.heartbeat_s: float | None = None
        """Seconds that a lease lasts (Note [Lease]); None before the plan; 0 for a local launcher, whose pipe
        ends.
        """
        self.lease = Lease()
        self._heard_at = boot_clock.now_s()
        self._commands = LineBuffer()
        os.set_blocking(stdin, False)

    def read(self) -> list[Event] | None:
        """Take the commands that have come; None when the launcher has hung up."""
        chunk = read_chunk(self.stdin)
        if chunk == b"":
            return None
        if chunk:
            self._heard_at = boot_clock.now_s()
        commands = list(self._commands.feed(chunk or b""))
        for command in commands:
            self.idle_s = float(command.get("idle_s", self.idle_s))
            if command.get("cmd") in ("ping", "pause") and command.get("lease") is not None:
                self.lease.extend(float(command["lease"]))
        return commands

    def take_plan(self, heartbeat_s: float, lease_end: float | None) -> bool:
        """Begin the lease of a plan. Return False where it has ended: the plan was on its way too long."""
        self.heartbeat_s = heartbeat_s
        end = boot_clock.now_s() + heartbeat_s if lease_end is None else lease_end
        self.lease.begin(heartbeat_s, end)
        return not self.lease_is_over()

    def await_plan(self) -> None:
        """Allow the launcher to be silent for as long as it has said, from now on."""
        self.heartbeat_s, self._heard_at = None, boot_clock.now_s()
        self.lease.close()

    def too_silent(self, grace_s: float) -> str:
        """Return why the run has to end here: no plan has come in time, or the lease ends within the grace
        period; "" while it may go on.
        """
        now = boot_clock.now_s()
        if self.heartbeat_s is None:
            return "no plan has come" if now - self._heard_at > self.idle_s else ""
        stop_at = self.lease.stop_at(grace_s)
        if stop_at is None or now < stop_at:
            return ""
        return f"the launcher has not been heard for {now - self._heard_at:.0f} s, and this node's lease ends"

    def lease_is_over(self) -> bool:
        """Tell whether the workers have to be killed at once."""
        kill_at = self.lease.kill_at()
        return kill_at is not None and boot_clock.now_s() >= kill_at

    def next_s(self, grace_s: float, longest_s: float) -> float:
        """Return the seconds in which the lease asks for nothing, `longest_s` at most."""
        now = boot_clock.now_s()
        moments = (self.lease.stop_at(grace_s), self.lease.kill_at())
        return min([longest_s, *(moment - now for moment in moments if moment is not None and moment > now)])

    def hand_over(self) -> None:
        """Write the rest of the output, for as long as the launcher takes some of it or is heard.

        A launcher on this machine may take its time: its terminal may be halted.
        """
        limit_s = self.heartbeat_s or _HALTED_S
        moved_at, listening = boot_clock.now_s(), True
        while self.outbox.pending:
            until = moved_at + limit_s
            if listening:  # a launcher that has been stopped in its terminal has granted a long lease
                until = max(until, self.lease.kill_at() or 0.0)
            left = until - boot_clock.now_s()
            if left <= 0:
                return
            before = self.outbox.pending
            readable, _, _ = select.select([self.stdin] if listening else [], [self.outbox.fd], [], left)
            self.outbox.flush()
            if self.outbox.pending < before:
                moved_at = boot_clock.now_s()
            if readable and self.read() is None:
                listening, limit_s = False, _GOODBYE_S
            elif readable:
                moved_at = boot_clock.now_s()


def take_user_input() -> int | None:
    """Return the descriptor of the user's own input, which rank 0 gets, if the launcher has handed it on."""
    fd = int(os.environ.pop("ZLAUNCH_STDIN_FD", "-1"))
    if fd < 0:
        return None
    os.set_inheritable(fd, False)
    return fd
