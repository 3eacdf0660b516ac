"""Test where the last lines of a log begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.cli import logs


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
