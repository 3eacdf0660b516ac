"""Notice that no rank writes or reports anything, and say where each one is.

`controller` asks for the stacks and stops the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zlaunch.system.messages import Exited, StandsStill

# -- positions --------------------------------------------------------------------------------------
#
# Find in the stacks of ranks where each is: which line of the script, in which call. Pure.
#
# faulthandler writes the stacks, also of a process whose threads are all blocked in native code.


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_START = ("/zlaunch/node/bootstrap.py", "/zlaunch/node/preload.py")
"""Files whose frames are at the bottom of a worker's main thread."""
_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib(?:64)?/python3\.\d+/|^<|/zlaunch/(?:runtime|node|compat|cuda_ops)/"
)
_COLLECTIVE = re.compile(r"/torch/distributed/distributed_c10d\.py$")
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
_MAY_WAIT = ("backward", "_wrapped_call_impl", "__call__", "step", "wait")
"""Calls of libraries that wait for other ranks in native code: DDP's backward pass, FSDP's forward pass."""
_LEFT_OUT = "a call that its stacks leave out"
_OURS = re.compile(r"/zlaunch/runtime/(?:comm|shared_memory)/")


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds one line of a stack."""

    file: str
    line: str
    function: str

    @property
    def is_the_scripts(self) -> bool:
        """Tell whether this is neither a library's line nor ours."""
        return _LIBRARY.search(self.file) is None

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Position:
    """Says where a rank is."""

    place: str
    """The innermost line of the script; of a library where the script has none."""
    call: str
    """The library's function that the script is in, or what the runtime does; empty for its own code."""
    waits: bool
    """Tells whether that is communication with other ranks."""
    before: str = ""
    """Describes a collective that others wait in and this rank has not begun."""

    def __str__(self) -> str:
        what = f"is at {self.place}, with no collective in its stack"
        if self.call:
            what = f"{'waits in' if self.waits else 'is in'} {self.call} ({self.place})"
        return f"{what}, and has not begun {self.before}, in which others wait" if self.before else what


def read_stacks(text: str) -> list[list[Frame]]:
    """Read the threads' stacks of the last dump in a rank's output, innermost frame first; the main thread
    comes first. Empty where the dump leaves it out: there are more threads than faulthandler writes.
    """
    dumps: list[list[list[Frame]]] = [[]]
    with_current: set[int] = set()
    is_open = is_cut = False
    for line in text.splitlines():
        if _THREAD.match(line):
            if not is_open and dumps[-1]:  # other output was between: another dump
                dumps.append([])
            dumps[-1].append([])
            is_open = True
            is_cut = False
            if line.startswith("Current"):
                with_current.add(len(dumps) - 1)
        elif is_open and (found := _FRAME.match(line)):
            dumps[-1][-1].append(Frame(*found.groups()))
        elif is_open and line == "...":
            is_cut = True
        elif is_open and line.strip() not in ("", "..."):
            is_open = False
    # What a program prints of its own looks like a dump, but names no current thread.
    threads = dumps[max(with_current, default=len(dumps) - 1)]
    known = [frames for frames in threads if frames]
    main = next((each for each in known if each[-1].file.endswith(_START)), None)
    if main is None and known and not is_cut:
        main = known[-1]  # the interpreter lists its threads from the newest to the oldest
    return [] if main is None else [main, *(each for each in known if each is not main)]


def find_position(text: str) -> Position | None:
    """Find where a rank is by its stacks; None where it has written none."""
    threads = read_stacks(text)
    if not threads:
        written = any(_THREAD.match(line) for line in text.splitlines())
        return Position("it has too many threads", _LEFT_OUT, False) if written else None
    main = threads[0]
    inner = next((i for i, frame in enumerate(main) if frame.is_the_scripts), None)
    place = str(main[0] if inner is None else main[inner])
    call = main[inner - 1].function if inner else ""
    waiting = main[:inner]
    if waiting and "/torch/autograd/" in waiting[0].file:  # on a GPU other threads run the backward pass
        others = (each for each in threads[1:] if any(_OURS.search(frame.file) for frame in each[:4]))
        waiting = [*next(others, []), *waiting]
    collective = ""
    for frame in waiting:
        public = not frame.function.startswith("_") and frame.function != "wrapper"
        if _COLLECTIVE.search(frame.file) and public:
            collective = frame.function  # the outermost of them is what was called
    ours = any(_OURS.search(frame.file) for frame in waiting[:6])
    return Position(place, collective or call, bool(collective) or ours)


def explain(positions: Mapping[int, Position], hosts: Mapping[int, str], silent: list[int]) -> list[str]:
    """Say in lines where the ranks are, those together that are at one place; the odd ones come first.
    ``silent``: ranks without an answer.
    """
    groups: dict[Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        groups.setdefault(position, []).append(rank)
    lines = []
    if silent:
        lines.append(f"{named(silent, hosts)} {'give' if len(silent) > 1 else 'gives'} no answer")
    for position in sorted(groups, key=lambda each: (each.waits, bool(each.call), len(groups[each]))):
        ranks = groups[position]
        text = str(position)
        if len(ranks) > 1:
            text = re.sub("^(?:is|waits)", lambda m: {"is": "are", "waits": "wait"}[m[0]], text)
            text = text.replace("in its stack", "in their stacks")
        others = [each for each in groups if each != position]
        if not position.before and not silent and _is_waited_for(position, others):
            text += f": the others probably wait for {'it' if len(ranks) == 1 else 'them'}"
        lines.append(f"{named(ranks, hosts)} {text}")
    calls = {position.call for position in groups}
    if len(calls) > 1 and not silent and all(each.waits for each in groups) and calls.isdisjoint(_P2P):
        lines.append(
            "these are different collectives: ranks of one group must call the same, in the same order"
        )
    return lines


def _is_waited_for(position: Position, others: Sequence[Position]) -> bool:
    """Tell whether all others seem to be in collectives while this one is not. Collectives that are called in
    native code have no line in a stack, so the others may be in calls that can contain one.
    """
    if not others or position.waits or position.call == _LEFT_OUT:
        return False
    if any(each.call in _P2P for each in others):
        return False  # who sends to whom is not known
    may_wait = all(each.waits or each.call in _MAY_WAIT for each in others)
    return all(each.waits for each in others) or (not position.call and may_wait)


def named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """Name ranks, such as `ranks 0, 2-7`; of one also its host."""
    if len(ranks) == 1:
        host = hosts.get(ranks[0])
        return f"rank {ranks[0]}" + (f" on {host}" if host else "")
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = [str(p[0]) if len(p) == 1 else f"{p[0]}{', ' if len(p) == 2 else '-'}{p[-1]}" for p in parts]
    return f"ranks {', '.join(shown)}"


# -- hang -------------------------------------------------------------------------------------------


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
        self.timeout_s = timeout_s
        self._hosts = hosts
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

    def standing(self, event: StandsStill) -> None:
        """Record what a rank that has stood still for some seconds says about that, or that it goes on."""
        note_standing(self._standing, event)

    def exited(self, event: Exited) -> None:
        """Record that a rank has ended."""
        self._ended[event.rank] = event.returncode
        self._standing.pop(event.rank, None)

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
        positions, silent = _positions(texts, self._standing, left)
        parts += [f"  {line}" for line in explain(positions, self._hosts, silent)]
        meet = any(each.waits and each.call != "init_process_group" for each in positions.values())
        if not self._was_active and not meet:
            parts.append("  they may still be starting: give --hang_timeout more seconds")
        if texts:
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


def note_standing(known: dict[int, Stand], event: StandsStill) -> None:
    """Note what a rank says about where it stands, or that it goes on. One of another form is left out."""
    if event.what is None or not isinstance(event.begun, dict) or not isinstance(event.unfinished, list):
        return
    try:
        unfinished = tuple((str(g), int(n), str(text)) for g, n, text in event.unfinished)
        begun = {str(group): int(number) for group, number in event.begun.items()}
    except (TypeError, ValueError, OverflowError):
        return
    stand = Stand(str(event.what), unfinished, begun)
    if isinstance(event.rank, int):
        known.pop(event.rank, None)
        if stand.what or stand.begun:
            known[event.rank] = stand


def where(
    texts: Mapping[int, str], standing: Mapping[int, Stand], hosts: Mapping[int, str], asked: Iterable[int]
) -> list[str]:
    """Say in lines where the ranks that were `asked` are, by the stacks they have written and by what the
    runtime has reported of those that stand still.
    """
    positions, silent = _positions(texts, standing, asked)
    return explain(positions, hosts, silent)


def _positions(
    texts: Mapping[int, str], standing: Mapping[int, Stand], asked: Iterable[int]
) -> tuple[dict[int, Position], list[int]]:
    """Return the position of each rank, and the ranks without an answer."""
    positions: dict[int, Position] = {}
    silent = []
    for rank in sorted(asked):
        found = find_position(texts.get(rank, ""))
        if found is None:
            silent.append(rank)
        else:
            positions[rank] = found if rank not in standing else _told(found, standing[rank], standing)
    return positions, silent


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
