"""Watches for ranks that wait for each other forever.

A rank that calls something collective which another rank does not call (``state_dict`` on rank 0 alone, a
forward pass that was given up on one rank) would wait until a timeout of half an hour. A thread of each
process looks at its main thread periodically. While that is blocked in a collective of the runtime, or of
torch.distributed, the thread publishes in a store which one, and since when. A rank that sees another blocked
in a different collective, each in need of the other, has the proof: both have been in those waits at one
moment, and neither wait can end. Where a rank stands still for other reasons, `standing` tells the launcher.
"""

from __future__ import annotations

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
# The launcher sees the stacks of all ranks; what a wait is about, and which collective of a GPU has not
# ended
# while the main thread waits for the device, only the process itself knows.


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
_GRACE_S = 10.0
"""Sets the time after which a main thread that cannot raise the verdict (it is inside a library) is ended."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Says where a rank's main thread is blocked."""

    wait: int
    """Numbers the wait in its process."""
    key: Key | None
    """Identifies the collective; None for one of torch.distributed that the script itself has called."""
    what: str
    where: str
    started: Mapping[str, int] = field(default_factory=dict)
    """Counts the collectives of a channel ("communicator/channel") that the rank has started."""
    beat: int = 0
    """Grows while the thread looks."""

    def has_started(self, key: Key) -> bool:
        return self.started.get(f"{key[0]}/{key[1]}", 0) > key[2]


def in_vain(mine: Blocked, other: Blocked) -> bool:
    """Decide whether the two ranks, blocked at one moment, keep each other from going on."""
    # Two calls of the script itself are not numbered, so nothing proves that they differ.
    if mine.key == other.key or (mine.key is None and other.key is None):
        return False
    # A collective that this rank has already started needs nothing more from it.
    needs_me = other.key is None or not mine.has_started(other.key)
    needs_other = mine.key is None or not other.has_started(mine.key)
    return needs_me and needs_other


class DeadlockWatch:
    """Compares the waits of this process with those of the others, through the store of the ranks'
    rendezvous.
    """

    def __init__(self, waits: Waits, rank: int, world_size: int) -> None:
        self._waits = waits
        self._rank = rank
        self._world_size = world_size
        self._store: Any = PrefixStore("zlaunch-watch", dist.distributed_c10d._get_default_store())
        self._standing = Standing(waits) if read_environment().event_fd is not None else None
        self._ended = threading.Event()
        self._thread = make_thread(self._look, "zlaunch-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5 * PERIOD_S)
        self._store = None

    def _look(self) -> None:
        now: Blocked | None = None
        others: dict[int, tuple[Blocked, int]] = {}
        published = False
        while not self._ended.wait(PERIOD_S):
            try:
                before = now
                now = self._blocked(now)
                if self._standing is not None:
                    self._standing.look("" if now is None else now.what)
                if now is None or before is None or now.wait != before.wait:
                    others.clear()
                    if published:
                        self._publish(None)
                    published = False
                    continue
                self._publish(now)
                published = True
                verdict = self._told(now) or self._judge(now, others)
            except Exception:  # the store went with rank 0, or the process is ending: nothing left to watch
                return
            if verdict is not None:
                self._end(now, verdict)
                return

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

    def _told(self, mine: Blocked) -> str | None:
        """Read the verdict that another rank has left for this one, about its present wait."""
        name = f"verdict/{self._rank}"
        if not self._store.check([name]):
            return None
        wait, verdict = json.loads(self._store.get(name).decode())
        return str(verdict) if wait == mine.wait else None

    def _judge(self, mine: Blocked, others: dict[int, tuple[Blocked, int]]) -> str | None:
        """Find a rank that this one keeps from going on, and that keeps this one; tell it, too."""
        for rank in range(self._world_size):
            name = f"blocked/{rank}"
            if rank == self._rank or not self._store.check([name]):
                continue
            text = self._store.get(name).decode()
            if not text:
                others.pop(rank, None)
                continue
            wait, key, what, where, started, beat = json.loads(text)
            other = Blocked(wait, tuple(key) if key else None, what, where, started, beat)
            first = others.get(rank)
            if first is None or first[0].wait != other.wait or not in_vain(mine, other):
                others[rank] = (other, other.beat)
            elif other.beat >= first[1] + 2:  # it was there after this rank had begun to look
                verdict = (
                    f"rank {self._rank} is deadlocked: it {mine.what}{mine.where}, while rank {rank} "
                    f"{other.what}{other.where}. All ranks must make the same calls: save_checkpoint and "
                    "load_checkpoint at every stage, GatheredParameters at stage 3, state_dict and "
                    "evaluation at stage 3 and with tensor, expert or sequence parallelism"
                )
                # Its search ends in vain once this rank stops publishing.
                self._store.set(f"verdict/{rank}", json.dumps([other.wait, verdict]))
                return verdict
        return None

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
    """Return the collective of torch.distributed over all ranks whose innermost frame this is."""
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
