"""Expand host lists: `node[01-16,20]`, `n[1-2]r[01-03]`, `a,b[1-2],c`, as SLURM writes them.

Pure functions. Order and zero padding are kept; text may follow a bracket (`gpu[1-4].cluster`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from zlaunch.errors import LaunchError

MAX_HOSTS = 65536
"""The most hosts that one list may stand for."""

_MAX_NAME_CHARS = 255
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"[^\s\[\],]+")


class HostListError(LaunchError, ValueError):
    """Says why a host list cannot be read; the text names the part and is for the user."""


def expand(text: str) -> list[str]:
    """Return the hosts of a comma-separated list, in order, repeated ones included; empty text has none."""
    if not text.strip():
        return []
    hosts: list[str] = []
    for token in _split(text):
        hosts += expand_pattern(token.strip())
        if len(hosts) > MAX_HOSTS:
            raise HostListError(f"{short(token)}: the list exceeds {MAX_HOSTS} hosts")
    return hosts


def expand_pattern(token: str) -> list[str]:
    """Return the hosts of one pattern, which has no comma outside brackets."""
    pieces = _GROUP.split(token)  # literal, group, literal, ..., literal
    literals = pieces[::2]
    groups = [_parse_group(group, token) for group in pieces[1::2]]
    for literal in filter(None, literals):
        if "[" in literal or "]" in literal:
            raise HostListError(f"{short(token)}: unbalanced or nested brackets")
        if not _NAME.fullmatch(literal):
            bad = next(char for char in literal if char.isspace() or char == ",")
            raise HostListError(f"{short(token)}: a host name cannot contain {bad!r}")
    if not token:
        raise HostListError(f"{token!r}: missing host name")
    count = math.prod(sum(len(numbers) for numbers, _ in group) for group in groups)
    if count > MAX_HOSTS:
        raise HostListError(f"{short(token)}: {count} hosts, the limit is {MAX_HOSTS}")
    longest = sum(map(len, literals)) + sum(
        max(max(width, len(str(numbers[-1]))) for numbers, width in group) for group in groups
    )
    if longest > _MAX_NAME_CHARS:
        raise HostListError(f"{short(token)}: a host name exceeds {_MAX_NAME_CHARS} characters")
    numbers = itertools.product(*([*_numbers(group)] for group in groups))
    return ["".join(itertools.chain(*zip(literals, (*row, ""), strict=True))) for row in numbers]


def _split(text: str) -> Iterator[str]:
    """Cut at the commas outside brackets."""
    start = depth = 0
    for index, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth <= 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def ranges(text: str) -> Iterator[tuple[str, range | None]]:
    """Yield the tokens of `0,2-3`, each with its numbers.

    A range that runs backwards has no numbers; a token that is neither a number nor a range has None.
    """
    for token in (piece.strip() for piece in text.split(",")):
        match = _RANGE.fullmatch(token)
        yield token, range(int(match[1]), int(match[2] or match[1]) + 1) if match else None


def _parse_group(text: str, token: str) -> list[tuple[range, int]]:
    """Read `01-16,20` as (numbers, width in digits)."""
    group: list[tuple[range, int]] = []
    for item, numbers in ranges(text):
        if numbers is None:
            raise HostListError(f"{short(token)}: {short(item)} is not a number or a range such as 01-16")
        if not numbers:
            raise HostListError(f"{short(token)}: the range {short(item)} is reversed")
        group.append((numbers, len(item.partition("-")[0])))
    return group


def _numbers(group: list[tuple[range, int]]) -> Iterator[str]:
    return (str(number).zfill(width) for numbers, width in group for number in numbers)


def short(text: str) -> str:
    """Quote a token for a message, and cut it where it is very long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
