"""Shorten a command for a table: the script's name and the end stay, because runs differ there."""

from __future__ import annotations

import os
from collections.abc import Sequence

_GAP = "..."
_LEAST_END = 8
"""Characters of the end that are worth a gap."""


def short_command(words: Sequence[str], width: int) -> str:
    """Return the command in at most `width` characters."""
    text = " ".join(words)
    if len(text) <= width:
        return text
    at = _script(words)
    before = f"{_GAP} " if at else ""
    named = f"{before}{os.path.basename(words[at])}"
    rest = " ".join(words[at + 1 :])
    whole = f"{named} {rest}".rstrip()
    if len(whole) <= width:
        return whole
    room = width - len(named) - len(_GAP) - 2
    if room >= _LEAST_END:
        return f"{named} {_GAP} {_last_words(rest, room)}"
    return whole[: width - len(_GAP)] + _GAP


def _script(words: Sequence[str]) -> int:
    """Return the index of the script or module; 0 where the words do not show it."""
    for index, word in enumerate(words):
        if word.endswith((".py", ".sh")):
            return index
        if word in ("-m", "--module") and index + 1 < len(words):
            return index + 1
    return 0


def _last_words(text: str, room: int) -> str:
    """Return the end of the text, from the beginning of a word if one begins in it."""
    end = text[-room:]
    if len(end) == len(text) or text[-room - 1] == " ":
        return end
    return end.partition(" ")[2] or end
