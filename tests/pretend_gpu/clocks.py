"""Keep vector clocks of streams and host threads, and what was found with them."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

Actor = tuple[str, int]
"""("host", a thread's number) or ("stream", its number)."""
Clock = dict[Actor, int]
TIME: Actor = ("time", 0)
"""Stands in a clock for the time in nanoseconds, where operations have a length: see timeline.py."""

lock = threading.RLock()
clocks: defaultdict[Actor, Clock] = defaultdict(dict)
"""Actor -> what of every actor is known to have happened before its next operation."""
_threads = threading.local()
_numbers = itertools.count()
_OURS = ("/runtime/", "/cuda_ops/")


@dataclass
class Findings:
    """Counts what was found since the last :meth:`clear`."""

    races: Counter[str] = field(default_factory=Counter)
    """Two accesses without an order, and memory given back too early."""
    mixes: Counter[str] = field(default_factory=Counter)
    """Operations on tensors of the host and of the device together."""
    waits: Counter[str] = field(default_factory=Counter)
    """Waits of the host for the device."""

    def clear(self) -> None:
        """Forget everything."""
        for kind in (self.races, self.mixes, self.waits):
            kind.clear()


findings = Findings()


def host() -> Actor:
    """Return the calling thread; by a number of ours, because a new thread may get the id of one that has
    ended, and would know what that one knew.
    """
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = next(_numbers)
    return ("host", number)


MAIN = host()
"""The main thread, which imports this."""


def join(clock: Clock, other: Clock) -> None:
    """Add what `other` knows to `clock`."""
    for actor, count in list(other.items()):  # a finalizer may run in between
        if clock.get(actor, 0) < count:
            clock[actor] = count


def tick(actor: Actor) -> int:
    """Count one more operation of an actor, and return its number."""
    clock = clocks[actor]
    clock[actor] = clock.get(actor, 0) + 1
    return clock[actor]


def known(clock: Clock, actor: Actor, count: int) -> bool:
    """Tell whether an operation has happened before whatever comes next by this clock."""
    return count <= clock.get(actor, 0)


def host_waits(actor: Actor, how: str) -> None:
    """Let the calling thread wait for a stream; noted where the stream has work that the thread cannot know
    to have ended.
    """
    with lock:
        behind = not known(clocks[host()], actor, clocks[actor].get(actor, 0))
        if behind:
            note_wait(how)
        join(clocks[host()], clocks[actor])


def note_wait(how: str) -> None:
    """Write down that the calling thread waits for the device; the runtime's own threads may."""
    thread = threading.current_thread().name
    aside = "aside: " if thread.startswith("zlaunch") else ""
    findings.waits[f"{aside}{how} in {where(2)}"] += 1


def where(frames: int = 3) -> str:
    """Return the innermost places of the runtime in the present stack."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < frames:
        code = frame.f_code
        module = _modules.get(code.co_filename)
        if module is None:
            module = _modules[code.co_filename] = _runtime_module(code.co_filename)
        if module:
            found.append(f"{module}.{code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "the script"


_modules: dict[str, str] = {}
"""File -> its module of the runtime, or "": every operation looks at some fifty frames."""


def _runtime_module(name: str) -> str:
    """Return the last part of a module's name, or "" for a file that is not the runtime's."""
    if any(part in name for part in _OURS) and "site-packages" not in name and "/tests/" not in name:
        return name.rpartition("/")[2].removesuffix(".py")
    return ""
