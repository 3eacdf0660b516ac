"""Watches for ranks that wait for each other forever.

A rank that calls something collective which another rank does not call (``state_dict`` on rank 0 alone, a
forward pass that was given up on one rank) would wait until a timeout of half an hour. A thread of each
process looks at its main thread periodically. While that is blocked in a collective of the runtime, or of
torch.distributed, the thread publishes in a store which one. Rank 0's thread reads them. Two ranks that are
blocked in different collectives at one moment, each in need of the other, are the proof that neither wait can
end. Where a rank stands still for other reasons, `standing` tells the launcher.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..environment import read_environment
from ..log import fail
from ..report import announce
from ..threads import make_thread
from .pending import Key, Waits, waits

# -- standing ---------------------------------------------------------------------------------------
#
# Tells the launcher where this rank stands still, in the runtime's own words.
#
# The launcher sees the stacks of all ranks. Only the process itself knows what a wait is about, and which
# collective of a GPU has not ended while the main thread waits for the device.


_LOOKS = 3
"""Looks at one place after which it is told."""
_MOST_COLLECTIVES = 3
_MOST_CHARS = 200
"""Limits what is told, so that an event is written at once."""


class Standing:
    """Compares where the main thread is at each look, and what the process has begun until then."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._before: object = None
        self._looks = 0
        self._told = False

    def look(self, what: str) -> None:
        """Take a look; ``what``: the collective that the main thread is blocked in, empty if in none."""
        frame = sys._current_frames().get(self._waits.main or 0)
        now = (id(frame), frame.f_lasti if frame is not None else 0, sum(self._waits.started.values()), what)
        self._looks = self._looks + 1 if now == self._before else 0
        self._before = now
        if self._looks >= _LOOKS and not self._told:
            self._told = True
            unfinished, begun = recorded_collectives()
            announce("standing", what=what, unfinished=unfinished, begun=begun)
        elif self._told and not self._looks:
            self._told = False
            announce("standing", what="", unfinished=[], begun={})


def recorded_collectives() -> tuple[list[tuple[str, int, str]], dict[str, int]]:
    """Read torch's flight recorder. Return the first collectives that have begun and not ended, each as its
    process group, its number there and a text such as ``nccl:all_reduce (number 12 in its group, shape
    [1024, 64])``, and the number of the last one begun of each group. Both are empty where nothing is
    recorded.
    """
    dump: Any = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return [], {}
    unfinished: list[tuple[str, int, str]] = []
    begun: dict[str, int] = {}
    try:
        for entry in json.loads(dump())["entries"]:
            if entry["is_p2p"]:
                continue
            group = str(entry["process_group"][0])
            number = int(entry["collective_seq_id"])
            begun[group] = max(number, begun.get(group, 0))
            if not entry["retired"] and entry["state"] != "completed":
                sizes = ", ".join(str(size) for size in entry["input_sizes"])[:_MOST_CHARS]
                text = f"{entry['profiling_name']} (number {number} in its group, shape {sizes})"
                unfinished.append((group, number, text))
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # another version's form
        return [], {}
    return unfinished[:_MOST_COLLECTIVES], begun


# -- watch ------------------------------------------------------------------------------------------


PERIOD_S = 2.0
"""Sets how often the thread looks; a wait shorter than that is never seen."""
_LOOKS_KEPT = 16
"""Counts the looks of which the judge keeps what it has read: more than a rank needs for two beats."""
_GRACE_S = 10.0
"""Sets the time after which a main thread that cannot raise the verdict (it is inside a library) is ended."""


_FOR_ALL = frozenset(
    [
        *("all_reduce", "all_reduce_coalesced", "barrier", "monitored_barrier"),
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
        *("all_gather_coalesced", "all_to_all", "all_to_all_single"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    ]
)
"""Names the calls of torch.distributed that no rank leaves before all have entered them."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Says where a rank's main thread is blocked."""

    wait: int
    """Numbers the wait in its process."""
    key: Key | None
    """Identifies the collective; None for a call of torch.distributed that the script itself has made."""
    what: str
    where: str
    started: Mapping[str, int] = field(default_factory=dict)
    """Counts the collectives of a channel ("communicator/channel") that the rank has started."""
    beat: int = 0
    """Grows while the thread looks."""

    @property
    def needs_all(self) -> bool:
        """Tell whether no rank can have left this call before all have entered it. A ``recv`` needs one rank,
        and the others leave a ``gather`` at once: that they are elsewhere proves nothing.
        """
        return self.key is not None or self.what.rpartition(".")[2] in _FOR_ALL

    def has_started(self, key: Key) -> bool:
        return self.started.get(f"{key[0]}/{key[1]}", 0) > key[2]


def _needed(
    key: Key | None, other: Key | None, ranks: list[int], blocked: Mapping[int, Blocked]
) -> list[int]:
    """Return those ``ranks``, all blocked in ``other``, without which the collective ``key`` cannot end."""
    # Two calls of the script itself are not numbered, so nothing proves that they differ.
    if key is None:
        return ranks if other is not None else []
    # A collective that a rank has already started needs nothing more from it.
    return [rank for rank in ranks if not blocked[rank].has_started(key)]


class Judge:
    """Finds ranks that keep each other from going on, in what all ranks have published.

    Note [Both at one moment]: two ranks are deadlocked only if both were in their waits at one moment. A rank
    that is read with beat n at one look, and with beat n + 2 or more at a later one, was in its wait when it
    was read first: the second of those beats began after that. A wait is thus known from its first reading to
    the last one that is two beats old. Within a look the ranks are read one after the other, so that two
    waits share a moment if they share the time from one look to the next.

    What a rank has started may be older than what is read of another one: a thread in the background starts
    collectives, too. A verdict is therefore given at the second look that finds it.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._first: dict[int, tuple[int, int]] = {}
        """Keeps each blocked rank's wait, and the look at which it was first read."""
        self._beats: dict[int, list[int]] = {}
        """Keeps the beats of that wait, one for each of the last looks."""
        self._suspected: dict[int, int] = {}
        """Maps the ranks that waited in vain at the last look to their waits."""

    def look(self, blocked: Mapping[int, Blocked]) -> dict[int, str]:
        """Take what the ranks have published; return a verdict for each rank that waits in vain."""
        self._looks += 1
        for rank in [rank for rank in self._first if rank not in blocked]:
            del self._first[rank]
            del self._beats[rank]
        at: dict[Key | None, list[int]] = {}
        for rank, wait in blocked.items():
            if self._first.get(rank, (0, 0))[0] != wait.wait:
                self._first[rank] = (wait.wait, self._looks)
                self._beats[rank] = []
            self._beats[rank].append(wait.beat)
            del self._beats[rank][:-_LOOKS_KEPT]
            at.setdefault(wait.key, []).append(rank)
        verdicts: dict[int, str] = {}
        # By collective, of which there are few; the ranks blocked in one do not keep each other.
        for (key, ranks), (other, others) in itertools.permutations(at.items(), 2):
            partners = _needed(key, other, others, blocked)
            for rank in _needed(other, key, ranks, blocked) if partners else []:
                partner = next((o for o in partners if self._together(rank, o)), None)
                if partner is not None:
                    verdicts.setdefault(rank, _verdict(rank, blocked[rank], partner, blocked[partner]))
        before = self._suspected
        self._suspected = {rank: blocked[rank].wait for rank in verdicts}
        return {rank: text for rank, text in verdicts.items() if before.get(rank) == blocked[rank].wait}

    def _together(self, rank: int, other: int) -> bool:
        """Tell whether both were in their waits from one look to the next."""
        return max(self._first[rank][1], self._first[other][1]) < min(self._until(rank), self._until(other))

    def _until(self, rank: int) -> int:
        """Return the last look at which the rank is known to have been in its wait."""
        beats = self._beats[rank]
        return self._looks - len(beats) + bisect.bisect_right(beats, beats[-1] - 2)


def _verdict(rank: int, mine: Blocked, partner: int, other: Blocked) -> str:
    return (
        f"rank {rank} is deadlocked: it {mine.what}{mine.where}, while rank {partner} "
        f"{other.what}{other.where}. All ranks must make the same calls: save_checkpoint and "
        "load_checkpoint at every stage, GatheredParameters at stage 3, state_dict and "
        "evaluation at stage 3 and with tensor, expert or sequence parallelism"
    )


class DeadlockWatch:
    """Publishes this process's waits in the store of the ranks' rendezvous, and reads the verdict there.

    Rank 0 judges for all: its store gets four requests for each blocked rank in a period. If every rank read
    all others, 1,024 ranks would send it 500,000 requests a second.
    """

    def __init__(self, waits: Waits, rank: int, world_size: int, store: Any = None) -> None:
        self._waits = waits
        self._rank = rank
        self._world_size = world_size
        if store is None:
            store = PrefixStore("zlaunch-watch", dist.distributed_c10d._get_default_store())
        self._store = store
        self._standing = Standing(waits) if read_environment().event_fd is not None else None
        self._judge = Judge() if rank == 0 else None
        self._now: Blocked | None = None
        self._published = False
        self._ended = threading.Event()
        self._thread = make_thread(self._run, "zlaunch-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5 * PERIOD_S)
        self._store = None

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            try:
                verdict = self.look()
            except Exception:  # the store went with rank 0, or the process is ending: nothing left to watch
                return
            if verdict is not None and self._now is not None:
                self._end(self._now, verdict)
                return

    def look(self) -> str | None:
        """Take one look; return the verdict about this rank's present wait, if there is one."""
        before = self._now
        now = self._blocked(before)
        self._now = now
        if self._standing is not None:
            self._standing.look("" if now is None else now.what)
        verdict = None
        if now is not None and now.needs_all and before is not None and now.wait == before.wait:
            self._publish(now)
            verdict = self._told(now)
        elif self._published:
            self._publish(None)
        if self._judge is not None:
            self._judge_all(self._judge)
        return verdict

    def _blocked(self, before: Blocked | None) -> Blocked | None:
        """Return where the main thread is, if that is a collective."""
        beat = 0 if before is None else before.beat + 1
        frame = sys._current_frames().get(self._waits.main or 0)
        # One read: the main thread may replace the tuple at any moment.
        note = self._waits.now
        if note is not None:
            number, key, what = note
            return Blocked(number, key, what, _place(frame), dict(self._waits.started), beat)
        name = _collective_of(frame)
        if name is None or frame is None:
            return None
        wait = -(hash((id(frame), frame.f_lasti)) & 0x7FFFFFFF) - 1
        return Blocked(wait, None, name, _place(frame), dict(self._waits.started), beat)

    def _publish(self, value: Blocked | None) -> None:
        text = "" if value is None else json.dumps([getattr(value, n) for n in Blocked.__slots__])
        self._store.set(f"blocked/{self._rank}", text)
        if self._published != (value is not None):
            self._published = value is not None
            self._store.add("count", 1 if self._published else -1)

    def _told(self, mine: Blocked) -> str | None:
        """Read the verdict that rank 0 has left for this one, about its present wait."""
        name = f"verdict/{self._rank}"
        if not self._store.check([name]):
            return None
        wait, verdict = json.loads(self._store.get(name).decode())
        return str(verdict) if wait == mine.wait else None

    def _judge_all(self, judge: Judge) -> None:
        """Read what all ranks have published, if any has, and leave the verdicts for them.

        Rank 0 reads its own at its next look: its store goes with it, and the others need the time.
        """
        blocked: dict[int, Blocked] = {}
        # A rank that ended while it was blocked stays counted. It costs requests, nothing else.
        for rank in range(self._world_size if self._store.add("count", 0) > 0 else 0):
            name = f"blocked/{rank}"
            text = self._store.get(name).decode() if self._store.check([name]) else ""
            if text:
                wait, key, what, where, started, beat = json.loads(text)
                blocked[rank] = Blocked(wait, tuple(key) if key else None, what, where, started, beat)
        for rank, verdict in judge.look(blocked).items():
            self._store.set(f"verdict/{rank}", json.dumps([blocked[rank].wait, verdict]))

    def _end(self, mine: Blocked, verdict: str) -> None:
        """Let the main thread raise the verdict, or end the process where it cannot."""
        self._waits.verdict = verdict
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if self._ended.wait(0.2):
                return
            present = self._blocked(None)
            if present is None or present.wait != mine.wait:
                return
        fail(f"error: {verdict}", sys.stderr)
        os._exit(1)


def _collective_of(frame: Any) -> str | None:
    """Return the call of torch.distributed in the group of all ranks whose innermost frame this is."""
    if frame is None or not str(frame.f_globals.get("__name__", "")).endswith("distributed_c10d"):
        return None
    names = []
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        group = frame.f_locals.get("group")
        if group is not None and group is not dist.group.WORLD:
            return None
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    public = [name for name in names if not name.startswith("_") and name != "wrapper"]
    return f"calls torch.distributed.{public[-1]}" if public else None


_LIBRARIES = ("torch.", "zlaunch.", "threading", "contextlib", "importlib", "selectors")
_HERE = os.path.dirname(os.path.abspath(__file__))


def _place(frame: Any) -> str:
    """Return the innermost line of the script itself, in words."""
    while frame is not None:
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", ""))
        if not os.path.abspath(file).startswith(_HERE) and not package.startswith(_LIBRARIES):
            return f" ({os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def install() -> None:
    """Start a watch with the first communicator of several ranks."""
    waits.make_watch = DeadlockWatch
