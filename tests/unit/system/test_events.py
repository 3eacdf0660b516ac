"""Test how a stream of chunks becomes events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zlaunch.system import events
from zlaunch.system.events import AgentStream, LineBuffer, decode, encode, encode_output

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


OUTPUT = st.tuples(st.integers(0, 999), st.sampled_from(["stdout", "stderr"]), st.binary(max_size=50))


@given(st.lists(EVENTS | OUTPUT), st.data())
def test_however_an_agent_s_stream_is_cut_output_is_the_same(sent: list[Any], data: st.DataObject) -> None:
    stream = b""
    expected: list[dict[str, Any]] = []
    for each in sent:
        if isinstance(each, tuple):
            stream += encode_output(*each)
            rank, name, raw = each
            expected.append({"type": "output", "rank": rank, "stream": name, "bytes": len(raw), "data": raw})
        else:
            events_alone = [event for event in each if event["type"] != "output"]
            stream += b"".join(map(encode, events_alone))
            expected += events_alone
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    agent = AgentStream()
    found: list[dict[str, Any]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += agent.feed(stream[start:stop])
    assert found == expected and not agent.damaged


def test_a_line_that_does_not_count_its_bytes_ends_the_stream() -> None:
    for size in (None, -1, 1.0, True, "5", (1 << 20) + 1):
        agent = AgentStream()
        line = encode({"type": "output", "rank": 0, "stream": "stdout", "bytes": size})
        (error,) = agent.feed(b"a noisy shell\n" + line + encode({"type": "x"}))
        assert error["type"] == "error" and repr(size) in error["message"] and agent.damaged
        assert list(agent.feed(encode({"type": "x"}))) == []


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
