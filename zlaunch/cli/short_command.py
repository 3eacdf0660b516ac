"""Shorten commands for a table: the script's name and its first options stay. Where that makes commands look
alike, their ends stay instead.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

_GAP = "..."
_LEAST_END = 8
"""Characters of the end that are worth a gap."""


def short_commands(commands: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return each command in at most `width` characters."""
    shown = [_with_start(words, width) for words in commands]
    meant: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for text, words in zip(shown, commands, strict=True):
        meant[text].add(tuple(words))
    return [
        text if len(meant[text]) == 1 else _with_end(words, width)
        for text, words in zip(shown, commands, strict=True)
    ]


def _with_start(words: Sequence[str], width: int) -> str:
    """Return the command with its end cut off, at the end of a word if it has a part of the options."""
    whole = _from_script(words, width)
    if len(whole) <= width:
        return whole
    cut = whole[: width - len(_GAP) - 1]
    least = len(_named(words)) + 1
    if whole[len(cut)] != " " and " " in cut[least:]:
        cut = cut.rpartition(" ")[0]
    return f"{cut.rstrip()} {_GAP}" if len(cut) > least else whole[: width - len(_GAP)] + _GAP


def _with_end(words: Sequence[str], width: int) -> str:
    """Return the command with a gap behind the script's name."""
    whole = _from_script(words, width)
    if len(whole) <= width:
        return whole
    named = _named(words)
    room = width - len(named) - len(_GAP) - 2
    if room >= _LEAST_END:
        return f"{named} {_GAP} {_last_words(whole[len(named) + 1 :], room)}"
    return whole[: width - len(_GAP)] + _GAP


def _from_script(words: Sequence[str], width: int) -> str:
    """Return the whole command if it fits, else what begins with its script's name."""
    text = " ".join(words)
    if len(text) <= width:
        return text
    return f"{_named(words)} {' '.join(words[_script(words) + 1 :])}".rstrip()


def _named(words: Sequence[str]) -> str:
    at = _script(words)
    before = f"{_GAP} " if at else ""
    return f"{before}{os.path.basename(words[at])}"


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
