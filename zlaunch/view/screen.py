"""Keep a line of our own below what others write to a terminal.

Note [The line below]
The line is drawn with the cursor saved and restored, so that it lies at the cursor (or, below an unfinished
line, in the row under it) and everything that others write continues where they left off, in their colors.
Erasing clears from the cursor to the end of the screen, which holds nothing but our line. It is drawn only
where that is so: not below a prompt, not in the middle of an escape sequence, and not where somebody has
moved the cursor up, since rows below it are theirs. Rows are never counted: a terminal that wraps our line
anew after it was resized still has the cursor at its beginning.
"""

from __future__ import annotations

import os
import re

_SAVE = b"\x1b7"
_RESTORE = b"\x1b8"
_RESET = b"\x1b[0m"
_CLEAR_BELOW = b"\x1b[J"
_ROW_BELOW = b"\x1bD\x1b[A"
"""Goes down a row, which scrolls at the bottom of the screen, and back up: there is a row below, then."""
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")
_UNFINISHED_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*|\][^\x07\x1b]*\x1b?)?$")
_UP = re.compile(rb"\x1b\[([0-9]*)[AF]")
_TAIL_BYTES = 4096
"""What is kept of an unfinished line: enough for any escape sequence."""


class LineBelow:
    """Says which bytes draw and erase the line, from all that has been written to the terminal."""

    def __init__(self) -> None:
        self.is_shown = False
        self.is_unfinished = False
        """Others' last line has no end yet."""
        self.overwrites_itself = False
        """Others' unfinished line is a progress bar, not a prompt."""
        self._shown_under = False
        self._rows_below = 0
        """Rows that may be others', from the cursor's on down, since they have moved it up."""
        self._tail = b""

    def is_free(self, columns: int) -> bool:
        """Tell whether the line may be drawn: the rows below the cursor are nobody's, the terminal waits for
        no more bytes, and its cursor does not stand behind a full row, which few terminals save.
        """
        if self._rows_below or _is_cut(self._tail):
            return False
        return not self.is_unfinished or not _ends_in_full_row(self._tail, columns)

    def passed(self, data: bytes) -> None:
        """Take note of what others have written."""
        at = 0
        for found in _UP.finditer(data):
            self._rows_below = max(0, self._rows_below - data.count(b"\n", at, found.start()))
            self._rows_below += int(found[1][:9] or b"1") + (not self._rows_below)
            at = found.end()
        self._rows_below = max(0, self._rows_below - data.count(b"\n", at))
        _, end, tail = data.rpartition(b"\n")
        if end:
            self._tail = b""
            self.overwrites_itself = False
        self.overwrites_itself = self.overwrites_itself or b"\r" in tail
        whole = self._tail + tail
        is_visible = bool(_SEQUENCE.sub(b"", whole)) or _is_cut(whole)
        self.is_unfinished = is_visible or (not end and self.is_unfinished)
        self._tail = whole[-_TAIL_BYTES:]

    def drawn(self, line: bytes) -> bytes:
        """Return what draws the line at the cursor, or under an unfinished line."""
        self.is_shown = True
        self._shown_under = self.is_unfinished
        under = _ROW_BELOW + _SAVE + b"\r\x1b[B" if self.is_unfinished else _SAVE
        return under + _RESET + line + _RESET + _RESTORE

    def erased(self) -> bytes:
        """Return what erases the line, if it is shown."""
        if not self.is_shown:
            return b""
        self.is_shown = False
        return _SAVE + _RESET + (b"\x1b[B\r" if self._shown_under else b"") + _CLEAR_BELOW + _RESTORE


def is_in_foreground(fd: int) -> bool:
    """Tell whether the shell has given us this terminal; a background job leaves the prompt alone."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the terminal that controls this process: nobody else has a prompt there
        return True


def _ends_in_full_row(line: bytes, columns: int) -> bool:
    """Tell whether the cursor of a terminal may stand behind the last column after an unfinished line."""
    from rich.cells import get_character_cell_size

    if len(line) >= _TAIL_BYTES:
        return True  # its beginning is not kept
    text = _SEQUENCE.sub(b"", line).decode("utf-8", "replace").rpartition("\r")[2]
    column = 0
    wraps = False
    for character in text.expandtabs():
        size = get_character_cell_size(character)
        wraps = size > 1 and column + size > columns  # where such a character goes, terminals differ
        column = size if column + size > columns else column + size
    return column == columns or wraps


def _is_cut(data: bytes) -> bool:
    """Tell whether data ends within an escape sequence or a character of several bytes."""
    return bool(_UNFINISHED_SEQUENCE.search(data[-_TAIL_BYTES:]) or unfinished_bytes(data))


def unfinished_bytes(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a character."""
    for count in range(1, min(4, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 != 0x80:
            needed = (
                4 if 0xF0 <= byte <= 0xF4 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC2 <= byte < 0xE0 else 1
            )
            return count if needed > count else 0
    return 0
