"""Writes what a run's other attempts have as short text, which the launcher writes and the runtime reads.

``ZLAUNCH_WORLD_SIZES`` has the numbers of ranks: ``24 8-16:8`` means 24 ranks without a failure, and 8 or 16
after one. ``ZLAUNCH_FIRST_BATCHES`` has the engines of the first attempt: ``96/4@24`` means a global batch of
96 with a micro-batch of 4 on 24 ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_BATCH = re.compile(r"(\d+)/(\d+)@(\d+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+):(\d+))?")


def write_world_sizes(sizes: Sequence[int]) -> str:
    """Return the text for numbers of ranks, of which the first one holds without a failure."""
    full = sizes[0]
    rest = sorted(set(sizes[1:]) - {sizes[0]})
    words = [str(full)]
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        length = 1
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        words.append(f"{rest[0]}-{rest[length - 1]}:{step}" if length > 1 else str(rest[0]))
        rest = rest[length:]
    return " ".join(words)


def read_world_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in a text, none for "". Raises ValueError for any other text."""
    sizes: list[int] = []
    for word in text.split():
        match = _RANGE.fullmatch(word)
        if match is None or int(match[1]) < 1 or match[3] == "0":
            raise ValueError(f'{word!r} is not a number of ranks or a range such as "8-16:8"')
        first = int(match[1])
        last = int(match[2] or first)
        step = int(match[3] or 1)
        sizes += range(first, last + 1, step)
    return tuple(sizes)


class FirstBatch(NamedTuple):
    """Describes an engine of a run's first attempt."""

    size: int
    """The global batch."""
    micro: int
    """Samples of a forward pass."""
    ranks: int

    def __str__(self) -> str:
        """Return the text that `read_first_batches` reads."""
        return f"{self.size}/{self.micro}@{self.ranks}"


def find_first_batch(batches: Sequence[FirstBatch], micro: int | None) -> FirstBatch | None:
    """Return the engine of the first attempt that one with this micro-batch repeats: a script may skip some.
    Where none has this micro-batch, the script has derived it from the number of ranks, and the order counts.
    """
    alike = (batch for batch in batches if batch.micro == micro)
    return next(alike, batches[0] if batches else None)


def read_first_batches(text: str) -> tuple[FirstBatch, ...]:
    """Return the engines in a text, none for "". Raises ValueError for any other text."""
    found = []
    for word in text.split():
        match = _BATCH.fullmatch(word)
        if match is None:
            raise ValueError(f'{word!r} is not "BATCH/MICRO@RANKS"')
        found.append(FirstBatch(*map(int, match.groups())))
    return tuple(found)
