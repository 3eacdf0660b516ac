"""Find what differs between runs: arguments, config keys, versions and devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOT_SET = "not set"


def find_differences(sides: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return a row for each name whose value is not the same on all sides: the name, and the values."""
    names = dict.fromkeys(name for side in sides for name in side)
    rows = [(name, *(side.get(name, NOT_SET) for side in sides)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def flat_config(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the values of a config by dotted key."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat_config(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def named_arguments(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command by name, and its other words by position. Values of an option that is
    repeated are joined.
    """
    found: dict[str, list[str]] = {}
    for name, value in _pairs(words):
        found.setdefault(name, []).append(value)
    return {name: " ".join(values) for name, values in found.items()}


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    position = 0
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            position += 1
            yield f"argument {position}", word
        elif "=" in word:
            name, _, value = word.partition("=")
            yield name, value
        elif rest and not _is_option(rest[0]) and not rest[0].endswith((".py", ".sh")):
            yield word, rest.pop(0)
        else:
            yield word, "set"  # a flag


def _is_option(word: str) -> bool:
    """Tell an option from a value such as -1 or 1e-4."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
