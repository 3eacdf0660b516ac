"""Writes the numbers of ranks that a run may have as short text: the value of ``ZLAUNCH_WORLD_SIZES``.

The launcher writes it and the runtime reads it: ``24 8-16:8`` means 24 ranks without a failure, and 8 or 16
after one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
