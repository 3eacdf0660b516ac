"""Test that tracebacks of deep recursion and long chains keep their ends, and that nothing else is cut."""

from __future__ import annotations

import builtins
import itertools
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.limits import LIMIT_S
from zlaunch.node.long_traceback import shorten

DEPTH = 50_000 if sys.version_info >= (3, 11) else 5_000
"""Frames. Before Python 3.11 each takes some of the C stack, which ends at about 16,000."""


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
    assert shorten(outer) == f"zlaunch: the traceback leaves out {DEPTH + 2 - 1000:,} frames in its middle\n"
    frames = traceback.extract_tb(error.__traceback__)
    assert len(frames) == 1000 and frames[0].name == "_caught"
    assert frames[-1].line == 'raise ValueError("at the bottom")'


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_an_exception_in_a_group_is_shortened() -> None:
    error = _caught(DEPTH)
    group = vars(builtins)["ExceptionGroup"]("several", [KeyError("x"), error])
    assert "frames" in shorten(group)
    assert len(traceback.extract_tb(error.__traceback__)) == 1000


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_a_long_chain_keeps_its_ends(link: str) -> None:
    chain: list[BaseException] = [ValueError(str(index)) for index in range(300)]
    for error, origin in itertools.pairwise(chain):
        setattr(error, link, origin)
    assert shorten(chain[0]) == "zlaunch: the traceback leaves out 200 exceptions in its middle\n"
    text = "".join(traceback.format_exception(chain[0]))
    shown = [line.removeprefix("ValueError: ") for line in text.splitlines() if "ValueError" in line]
    assert shown == [str(index) for index in (*range(299, 249, -1), *range(49, -1, -1))]


def test_what_python_allows_by_default_is_left_alone() -> None:
    error = _caught(900)
    error.__context__ = error  # a circle
    hidden = KeyError("hidden")
    hidden.__context__ = _caught(DEPTH)
    hidden.__suppress_context__ = True
    assert (shorten(error), shorten(hidden)) == ("", "")
    assert len(traceback.extract_tb(error.__traceback__)) == 902


def test_a_worker_says_what_it_leaves_out_and_reports_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    recursion = f"import sys\nsys.setrecursionlimit({DEPTH})\ndef f():\n    g()\ndef g():\n    f()\nf()\n"
    script.write_text(recursion)
    argv = [sys.executable, "-m", "zlaunch.node.bootstrap", str(script)]
    with open(tmp_path / "events", "w+") as events:
        env = {**os.environ, "ZLAUNCH_EVENT_FD": str(events.fileno())}
        process = subprocess.run(
            argv,
            env=env,
            pass_fds=(events.fileno(),),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        events.seek(0)
        event = events.read()
    left_out = "zlaunch: the traceback leaves out"
    assert process.stderr.startswith(left_out) and process.stderr.count("in f\n") == 500
    assert process.stderr.splitlines()[-1].startswith("RecursionError: maximum recursion depth exceeded")
    assert left_out in event and event.count("in f\\n") == 500
