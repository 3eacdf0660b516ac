"""Decide until when the workers of a node may run. Pure.

Note [Lease]
After a network cut the workers of a node and their successors elsewhere must never run at the same time. The
agent and the launcher share no clock and messages take any time, so:

- The agent's signs of life (the answers to `hello` and to pings) carry a beat: when they were sent, by the
  agent's clock.
- The launcher notes when it hears a beat, by its own clock. Since a message arrives after it was sent, the
  difference of the two is at least that of the two clocks (`zlaunch/supervisor/clock_bound.py`).
- With the plan and each ping, the launcher sends the lease's end on the agent's clock. It subtracts the upper
  bound of how far its clock is ahead of the agent's, so a delayed message can only shorten the lease.

The launcher always grants until --heartbeat seconds after it last heard anything of the node. So it knows
without asking that all workers there are dead --heartbeat seconds after the node's last word, and starts the
next attempt only then. The grace period lies inside the lease: SIGTERM before its end, SIGKILL at it.
Both ends count on CLOCK_BOOTTIME: the time in which a machine is suspended counts.
"""

from __future__ import annotations

_GRACE_SHARE = 3
"""The grace period takes at most this part (a third) of the heartbeat."""
_KILL_S = 0.5
_KILL_SHARE = 10
"""Seconds before the lease's end at which SIGKILL is sent, but at most this part of the heartbeat."""


class Lease:
    """Keeps the lease of one node, in seconds of the agent's clock."""

    def __init__(self) -> None:
        self._heartbeat_s = 0.0
        self._end: float | None = None

    def begin(self, heartbeat_s: float, end: float) -> None:
        """Begin with a plan. A `heartbeat_s` of 0 needs no lease: the launcher is on this machine."""
        self._heartbeat_s = heartbeat_s
        self._end = end if heartbeat_s else None

    def extend(self, end: float) -> None:
        """Take the launcher's newest grant."""
        # A grant that was on its way when the lease was closed must not begin another one.
        if self._end is not None:
            self._end = end

    def close(self) -> None:
        """End the lease: no worker runs any more."""
        self._end = None

    def kill_at(self) -> float | None:
        """Return when all that is left has to be killed; None without a lease."""
        if self._end is None:
            return None
        return self._end - min(_KILL_S, self._heartbeat_s / _KILL_SHARE)

    def stop_at(self, grace_s: float) -> float | None:
        """Return when the workers have to be asked to end; None without a lease."""
        kill_at = self.kill_at()
        if self._end is None or kill_at is None:
            return None
        # At most a third of the heartbeat before the end: with a long grace period, a short silence would
        # stop the run.
        return min(kill_at, self._end - min(grace_s, self._heartbeat_s / _GRACE_SHARE))
