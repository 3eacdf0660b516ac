"""Say how a run ended: an exit code, its cause, and the hosts or slots that are to blame."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from zlaunch.errors import NodeError
from zlaunch.system.processes import signal_name

Cause = Literal["finished", "failed", "refused", "host refused", "stopped", "saved", "timed out", "lost"]
"""Why a run ended.

- finished: every worker ended with code 0.
- failed: a worker failed: an exception, an exit code, a signal that zlaunch did not send, a hang.
- refused: no worker was started, for a reason that other hosts do not cure: options, the config, the plan.
- host refused: no worker was started, because of hosts: ssh fails, no answer, no Python. Or because of slots:
  a GPU is missing, or did not work at the start.
- stopped: the user stopped it: Ctrl-C, a signal to the launcher, `zlaunch stop`, `zlaunch cancel`.
- saved: it saved as it was asked to, and is to be started again.
- timed out: its time limit passed: `--time`, or SLURM's.
- lost: the launcher was killed, or every agent was. Nobody wrote an end.
"""

SAVED_CODE: Final = 75
"""Exit code of a worker that has saved and ended because it was asked to: "start me again" (EX_TEMPFAIL). The
runtime uses this number as well.
"""
REFUSED_CODE: Final = 2

_WORDS: Final[Mapping[Cause, str]] = {"saved": "saved and stopped"}
_STOP_CODES: Final = tuple(128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


Slot = tuple[str, int]
"""A host and the number of a slot there."""


@dataclass(frozen=True, slots=True)
class End:
    """Describes the end of a run or of one attempt of a queue."""

    code: int
    """The launcher's exit code."""
    cause: Cause
    hosts: tuple[str, ...] = ()
    """The hosts that refused; empty with every other cause."""
    slots: tuple[Slot, ...] = ()
    """The slots that refused, on hosts that are well otherwise; empty with every other cause."""

    @classmethod
    def refused_by(cls, errors: Iterable[NodeError]) -> End:
        """Return the end of a run that these errors have kept from starting."""
        known = list(errors)
        slots = tuple((error.host, slot) for error in known for slot in error.slots)
        return cls(REFUSED_CODE, "host refused", tuple(e.host for e in known if not e.slots), slots)

    @property
    def words(self) -> str:
        """Return the cause as people read it beside the code: "timed out", "stopped by SIGTERM"."""
        if places := (*self.hosts, *(f"{host}:{slot}" for host, slot in self.slots)):
            return f"{self.cause}: {', '.join(places)}"
        if self.cause == "stopped" and self.code in _STOP_CODES:  # by the user, or by SLURM's time limit
            return f"stopped by {signal_name(self.code - 128)}"
        return _WORDS.get(self.cause, self.cause)

    def as_json(self) -> dict[str, Any]:
        """Return the entries of `launcher.json` and of a queue's attempt."""
        about = {"exit_code": self.code, "cause": self.cause}
        return {**about, "bad_hosts": self.hosts, "bad_slots": self.slots}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> End | None:
        """Read the entries of `as_json`; None where there is no exit code.

        A cause that this version does not know reads as "failed". Versions up to 0.2.0 wrote no cause: their
        exit code tells it.
        """
        code = content.get("exit_code")
        cause = content.get("cause")
        hosts = content.get("bad_hosts")
        if not isinstance(code, int) or isinstance(code, bool):
            return None
        if cause is None:
            return cls.of_code(code)
        listed = hosts if isinstance(hosts, (list, tuple)) else ()
        named = tuple(host for host in listed if isinstance(host, str))
        slots = read_slots(content.get("bad_slots"))
        return cls(code, cause if cause in get_args(Cause) else "failed", named, slots)

    @classmethod
    def of_code(cls, code: int) -> End:
        """Return the end that an exit code tells best, where nobody has written down the cause."""
        if code == 0:
            return cls(code, "finished")
        if code == SAVED_CODE:
            return cls(code, "saved")
        if code == REFUSED_CODE:
            return cls(code, "refused")
        return cls(code, "stopped" if code in _STOP_CODES else "failed")


def read_slots(content: object) -> tuple[Slot, ...]:
    """Read slots from JSON; leave out what is damaged."""
    found = []
    if isinstance(content, (list, tuple)):
        for each in content:
            match each:
                case [str(host), int(slot)]:
                    found.append((host, slot))
    return tuple(found)
