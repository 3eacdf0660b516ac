"""Tells the launcher where this rank stands still, in the runtime's own words.

The launcher sees the stacks of all ranks; what a wait is about, and which collective of a GPU has not ended
while the main thread waits for the device, only the process itself knows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch._C._distributed_c10d as c10d

from ..comm.waits import Waits
from ..report import announce

_LOOKS = 3
"""Looks at one place after which it is told."""
_MOST_COLLECTIVES, _MOST_CHARS = 3, 200
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
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            begun[group] = max(number, begun.get(group, 0))
            if not entry["retired"] and entry["state"] != "completed":
                sizes = ", ".join(str(size) for size in entry["input_sizes"])[:_MOST_CHARS]
                text = f"{entry['profiling_name']} (number {number} in its group, shape {sizes})"
                unfinished.append((group, number, text))
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # another version's form
        return [], {}
    return unfinished[:_MOST_COLLECTIVES], begun
