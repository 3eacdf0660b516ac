"""Test where the last lines of a log begin."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.cli import logs
from zlaunch.supervisor.run_files import LogPiece
from zlaunch.view.console import Console


@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    st.booleans(),
    st.integers(0, 35),
    st.integers(1, 16),
)
def test_the_last_lines(lines: list[bytes], ends: bool, count: int, block: int) -> None:
    if lines and not ends:
        lines[-1] = lines[-1] or b"x"
    text = b"\n".join(lines) + (b"\n" if lines and ends else b"")
    path = Path("log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK_BYTES", block)
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "log")
            path.write_bytes(text)
            begin = logs.offset_of_last(path, count)
    parts = re.findall(rb"[^\n]*\n|[^\n]+", text)
    assert text[begin:] == b"".join(parts[-count:] if count else [])


@pytest.mark.parametrize(
    ("older", "log"),
    [(b"1\n2\n3\n", b"4\n5\n"), (b"1\n2\n3", b"\n4\n5\n"), (b"1\n2\n3\n4", b"\n5"), (b"1\n2\n3\n4\n", b"5")],
)
@pytest.mark.parametrize("count", range(8))
def test_the_last_lines_of_a_log_in_two_halves(tmp_path: Path, older: bytes, log: bytes, count: int) -> None:
    path = tmp_path / "rank_00000.log"
    path.write_bytes(log)
    path.with_name("rank_00000.log.1").write_bytes(older)
    shown = b"".join(piece.data for piece in logs._reader(path, count).read(100))
    lines = re.findall(rb"[^\n]*\n|[^\n]+", older + log)
    assert shown == b"".join(lines[-count:] if count else [])


def test_pieces_before_a_moment_and_of_the_other_stream_are_not_shown() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    console = Console([0], out=out, err=err, terminal=False)
    show = logs._Show(console, timestamps=False, since_s=5.0, only="stdout")
    for data, stream, time_s in (
        (b"before\n", "stdout", 4.0),
        (b"at\n", "stdout", 5.0),
        (b"error\n", "stderr", 6.0),
        (b"unknown\n", "stdout", None),
        (b"after\n", "stdout", 7.0),
    ):
        show(0, LogPiece(data, stream, time_s))
    console.close()
    assert out.getvalue() == b"at\nafter\n" and err.getvalue() == b""
