"""Test how a stream of chunks becomes events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zlaunch.system import events
from zlaunch.system.events import LineBuffer, decode, encode

TEXTS = st.text(alphabet=st.characters())
EVENTS = st.lists(st.fixed_dictionaries({"type": TEXTS, "values": st.dictionaries(TEXTS, st.integers())}))


@given(EVENTS, st.data())
def test_however_a_stream_is_cut_the_events_are_the_same(
    sent: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    buffer = LineBuffer()
    found: list[dict[str, Any]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += buffer.feed(stream[start:stop])
    assert found == sent


def test_what_is_no_event_is_left_out() -> None:
    lines = (b"[1]\n", b"no json\n", b"{\n", b"[" * 100_000 + b"\n", b"\xff\n", b'{"type":"x"}\n')
    assert list(LineBuffer().feed(b"".join(lines))) == [{"type": "x"}]
    assert decode(b"3") is None


def test_a_line_without_an_end_takes_no_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "_LINE_LIMIT_BYTES", 10)
    buffer = LineBuffer()
    for _ in range(3):
        assert list(buffer.feed(b"x" * 11)) == []
    assert list(buffer.feed(b"\n" + encode({"type": "x"}))) == [{"type": "x"}]
