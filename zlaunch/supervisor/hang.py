"""Notice that no rank writes or reports anything, and say where each one is.

`controller` asks for the stacks and stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zlaunch.supervisor.positions import Position, explain, find_position, named
from zlaunch.system.events import Event

_STACKS_S = 2.0
"""Seconds that the ranks get to write their stacks."""
_STACK_LINES = 40
_KEPT_BYTES = 1 << 20


class HangWatch:
    """Notices when no rank has written anything for a time, and collects the stacks asked for then.

    A timeout of 0 watches nothing.
    """

    def __init__(self, timeout_s: float, hosts: Mapping[int, str]) -> None:
        """Watch the ranks, which are the keys of ``hosts``."""
        self.timeout_s, self._hosts = timeout_s, hosts
        self._last = time.monotonic()
        self._was_active = False
        """Whether any rank has written or reported anything, so that the start is over."""
        self._asked: float | None = None
        self._collected = False
        self._written: dict[int, bytes] = {}
        """What the ranks have written since they were asked for their stacks."""
        self._standing: dict[int, Stand] = {}
        self._ended: dict[int, int] = {}
        """The exit codes of ranks that have ended, by rank."""

    def activity(self) -> None:
        """Record that some rank is alive and well."""
        if self._asked is None:
            self._was_active = True
            self._last = time.monotonic()

    def standing(self, event: Event) -> None:
        """Record what a rank that has stood still for some seconds says about that, or that it goes on; also
        that an engine has been built.
        """
        if event["type"] == "environment":
            self.activity()
        note_standing(self._standing, event)

    def exited(self, event: Event) -> None:
        """Record that a rank has ended."""
        self._ended[event["rank"]] = event["returncode"]
        self._standing.pop(event["rank"], None)

    def output(self, rank: int, data: bytes) -> None:
        """Record a rank's output; after the stacks were asked for, it belongs to them."""
        self.activity()
        if self._asked is not None:
            self._written[rank] = (self._written.get(rank, b"") + data)[-_KEPT_BYTES:]

    def next_s(self) -> float:
        """Return the seconds until something may be due."""
        if not self.timeout_s or self._collected:
            return 3600.0
        due = self._last + self.timeout_s if self._asked is None else self._asked + _STACKS_S
        return max(0.01, due - time.monotonic())

    def due(self) -> bool:
        """Tell whether it is time to ask for the stacks; return True once."""
        if self.timeout_s and self._asked is None and time.monotonic() - self._last >= self.timeout_s:
            self._asked = time.monotonic()
            return True
        return False

    def over(self) -> bool:
        """Tell whether the ranks have had their time to write the stacks; return True once."""
        if self._asked is not None and not self._collected and time.monotonic() - self._asked >= _STACKS_S:
            self._collected = True
            return True
        return False

    def report(self) -> str:
        """Say that the run hangs and where each rank is, and add the stacks, rank by rank."""
        parts = [f"hang: no rank has written anything for {self.timeout_s:g} s"]
        for code in sorted(set(self._ended.values())):
            ranks = [rank for rank in self._ended if self._ended[rank] == code]
            have = "have" if len(ranks) > 1 else "has"
            parts.append(f"  {named(sorted(ranks), self._hosts)} {have} ended with code {code}")
        left = self._hosts.keys() - self._ended.keys()
        texts = {rank: data.decode("utf-8", "replace") for rank, data in self._written.items()}
        parts += [f"  {line}" for line in where(texts, self._standing, self._hosts, left)]
        if not self._was_active:
            parts.append("  they may still be starting: give --hang_timeout more seconds")
        parts.append("  what each was doing:")
        for rank in sorted(texts):
            lines = texts[rank].splitlines()[-_STACK_LINES:]
            parts += [f"  rank {rank}:", *(f"    | {line}" for line in lines)]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Stand:
    """Holds what a rank that stands still has said."""

    what: str
    """Says what its main thread waits for; empty if not for other ranks, as far as it can tell."""
    unfinished: tuple[tuple[str, int, str], ...]
    """Process group, number and description of collectives that have begun and not ended."""
    begun: Mapping[str, int]
    """The number of the last collective begun of each process group."""


def note_standing(known: dict[int, Stand], event: Event) -> None:
    """Note what a rank's `standing` event says, or that it goes on. One of another form is left out."""
    rank = event.get("rank")
    try:
        unfinished = tuple((str(g), int(n), str(text)) for g, n, text in event["unfinished"])
        begun = {str(group): int(number) for group, number in event["begun"].items()}
        stand = Stand(str(event["what"]), unfinished, begun)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return
    if isinstance(rank, int):
        known.pop(rank, None)
        if stand.what or stand.begun:
            known[rank] = stand


def where(
    texts: Mapping[int, str], standing: Mapping[int, Stand], hosts: Mapping[int, str], asked: Iterable[int]
) -> list[str]:
    """Say in lines where the ranks that were `asked` are, by the stacks they have written and by what the
    runtime has reported of those that stand still.
    """
    positions: dict[int, Position] = {}
    silent = []
    for rank in sorted(asked):
        found = find_position(texts.get(rank, ""))
        if found is None:
            silent.append(rank)
        else:
            positions[rank] = found if rank not in standing else _told(found, standing[rank], standing)
    return explain(positions, hosts, silent)


def _told(found: Position, stand: Stand, standing: Mapping[int, Stand]) -> Position:
    """Add to a position what its rank has said. A main thread that waits for its GPU looks like one that
    computes: then the collectives tell, of which a late rank has begun fewer.
    """
    if stand.what:
        calls = stand.what.removeprefix("calls ")
        return replace(found, call=calls if calls != stand.what else f"a collective that {calls}", waits=True)
    if found.waits:
        return found
    for other in standing.values():
        for group, number, text in other.unfinished:
            if 0 < stand.begun.get(group, 0) < number:
                return replace(found, before=text)
    if stand.unfinished:
        return replace(found, call=stand.unfinished[0][2], waits=True)
    return found
