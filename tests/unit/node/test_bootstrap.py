"""Test what a worker makes of an exception before it ends."""

from __future__ import annotations

import sys
import traceback

from zlaunch.node.bootstrap import _shorten

DEPTH = 50_000


def _fall(depth: int) -> None:
    if depth == 0:
        raise ValueError("at the bottom")
    _fall(depth - 1)


def _caught(depth: int) -> ValueError:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(2 * DEPTH)
    try:
        _fall(depth)
    except ValueError as error:
        return error
    finally:
        sys.setrecursionlimit(before)
    raise AssertionError


def test_a_deep_traceback_keeps_its_beginning_and_its_end() -> None:
    error = _caught(DEPTH)
    outer = RuntimeError("outer")
    outer.__cause__ = error
    _shorten(outer)
    frames = traceback.extract_tb(error.__traceback__)
    assert len(frames) == 1000 and frames[0].name == "_caught"
    assert frames[-1].line == 'raise ValueError("at the bottom")'
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [f"{DEPTH + 2 - 1000:,} frames in the middle are not shown"]


def test_an_ordinary_traceback_is_left_alone() -> None:
    error = _caught(900)
    error.__context__ = error
    _shorten(error)
    assert len(traceback.extract_tb(error.__traceback__)) == 902 and not hasattr(error, "__notes__")
