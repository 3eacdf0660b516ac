"""Leave out the middle of an exception's traceback where it is too long to be formatted or read."""

from __future__ import annotations

import builtins
from typing import Any

_FRAMES = 500
"""Frames shown at each end. Together they are Python's recursion limit: with that, nothing is left out."""
_LINKS = 50
"""Exceptions shown at each end of a chain ("During handling of the above exception ...")."""
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
"""The class of exceptions that hold several; Python 3.10 has none."""


def shorten(error: BaseException) -> str:
    """Shorten the tracebacks of an exception, of those it came from, and of their chain.

    A recursion of a million frames takes Python many seconds to format.

    Returns:
        A line that says what is left out; "" if nothing is.
    """
    known: set[int] = set()
    todo = [error]
    frames = links = 0
    while todo:
        chain = _chain(todo.pop(), known)
        for each in chain:
            frames += _cut_frames(each)
            todo += each.exceptions if isinstance(each, _GROUP) else ()
        if len(chain) > 2 * _LINKS:
            _link(chain[_LINKS - 1], chain[-_LINKS])
            links += len(chain) - 2 * _LINKS
    parts = [f"{frames:,} frames"] * bool(frames) + [f"{links:,} exceptions"] * bool(links)
    return f"zlaunch: the traceback leaves out {' and '.join(parts)} in its middle\n" if parts else ""


def _chain(error: BaseException | None, known: set[int]) -> list[BaseException]:
    """List an exception and those it came from, as Python shows them."""
    chain = []
    # Several exceptions may have one origin, and a script may tie a chain into a circle.
    while error is not None and id(error) not in known:
        known.add(id(error))
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _cut_frames(error: BaseException) -> int:
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at)
        at = at.tb_next
    if len(frames) <= 2 * _FRAMES:
        return 0
    frames[_FRAMES - 1].tb_next = frames[-_FRAMES]
    return len(frames) - 2 * _FRAMES


def _link(error: BaseException, origin: BaseException) -> None:
    if error.__cause__ is not None:
        error.__cause__ = origin
    else:
        error.__context__ = origin
