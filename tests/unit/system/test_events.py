"""Test how a stream of chunks becomes events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.system import events
from zlaunch.system.events import AgentStream, LineBuffer, Output, decode, encode, encode_output, in_envelope

TEXTS = st.text(alphabet=st.characters())
EVENTS = st.lists(st.fixed_dictionaries({"type": TEXTS, "values": st.dictionaries(TEXTS, st.integers())}))


@pytest.mark.rotated
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


@pytest.mark.rotated
@given(st.lists(EVENTS | OUTPUT), st.data())
def test_however_an_agent_s_stream_is_cut_output_is_the_same(sent: list[Any], data: st.DataObject) -> None:
    stream = b""
    expected: list[dict[str, Any] | Output] = []
    for each in sent:
        if isinstance(each, tuple):
            stream += encode_output(*each)
            rank, name, raw = each
            expected.append(Output(rank, name, raw))
        else:
            events_alone = [event for event in each if event["type"] != "output"]
            stream += b"".join(map(encode, events_alone))
            expected += events_alone
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    agent = AgentStream()
    found: list[dict[str, Any] | Output] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += agent.feed(stream[start:stop])
    assert found == expected and not agent.damaged


def test_output_costs_no_more_bytes_than_it_has() -> None:
    data = bytes(range(256)) * 1000
    assert len(encode_output(100_000, "stderr", data)) < len(data) + 100


def kinds_of(found: Iterable[dict[str, Any] | Output]) -> list[str]:
    return ["output" if isinstance(event, Output) else event["type"] for event in found]


HEADER = {"type": "output", "rank": 0, "stream": "stdout", "bytes": 5}
NEXT = encode({"type": "x"})


@pytest.mark.parametrize(
    "changes",
    [
        *({"bytes": size} for size in (None, -1, 1.0, True, "5", (1 << 20) + 1)),
        *({"rank": rank} for rank in (None, "0", False)),
        *({"stream": stream} for stream in (None, "other", 1)),
    ],
)
def test_a_header_that_makes_no_sense_ends_the_stream(changes: dict[str, Any]) -> None:
    agent = AgentStream()
    (end,) = agent.feed(b"a noisy shell\n" + encode({**HEADER, **changes}) + NEXT)
    assert kinds_of([end]) == ["damaged"] and "no header" in str(end) and agent.damaged
    assert list(agent.feed(NEXT)) == []


@pytest.mark.parametrize("noise", [b"a shell's prompt\n", b"[1]\n", b"{}\n", b"\n", b"prompt> "])
def test_other_words_count_as_damage_once_output_has_come(noise: bytes) -> None:
    agent = AgentStream()
    output = encode_output(0, "stdout", b"hello")
    stream = b"noise\n{}\n" + NEXT + output + NEXT + noise + NEXT + NEXT
    kinds = kinds_of(agent.feed(stream))
    assert kinds == ["x", "output", "x", "damaged"]


def test_bytes_that_are_lost_or_added_end_the_stream_before_output_is_taken_for_events() -> None:
    forged = encode({"type": "done", "stays": False}) * 3
    whole = encode_output(0, "stdout", forged)
    at = len(whole) - len(forged)
    follows = encode_output(0, "stdout", b"z" + forged)
    # With as many bytes lost as stand before the "z", a forged event follows what is taken for the end.
    cut = [whole[:at] + whole[at + lost :] for lost in (1, 1 + follows.index(b"z"))]
    for data in (*cut, whole[:at] + b"x" + whole[at:], whole[:-1]):
        agent = AgentStream()
        found = list(agent.feed(data + follows + NEXT))
        assert kinds_of(found)[-1] == "damaged"
        assert not {"done", "x"} & set(kinds_of(found))


def test_a_line_without_an_end_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LINE_LIMIT_BYTES", 100)
    agent = AgentStream()
    assert list(agent.feed(b"x" * 100)) == []
    (end,) = agent.feed(b"x")
    assert kinds_of([end]) == ["damaged"] and agent.damaged


@pytest.mark.parametrize("inner", [None, [], {}, {"type": "done"}, {"type": ["metrics"]}])
def test_an_envelope_holds_an_event_of_a_script(inner: Any) -> None:
    agent = AgentStream()
    (end,) = agent.feed(encode({"type": "script", "rank": 0, "event": inner}))
    assert kinds_of([end]) == ["damaged"]


def test_what_a_script_reports_is_put_in_a_form_that_can_be_shown() -> None:
    huge = 10**400
    values = ["\\ud83d\\ude00", "\\udc00", huge, -huge, 7, True, 0.5]
    line = json.dumps({"type": "metrics", "\ud800": values}).replace("\\\\", "\\")
    event = in_envelope(3, json.loads(line))["event"]
    assert event == {"type": "metrics", "?": ["\U0001f600", "?", math.inf, -math.inf, 7, True, 0.5]}


def test_a_script_s_event_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="100 levels"):
        in_envelope(0, {"type": "metrics", "values": deep})
    monkeypatch.setattr(events, "_LINE_LIMIT_BYTES", 1000)
    with pytest.raises(ValueError, match="the limit is 1,000"):
        in_envelope(0, {"type": "metrics", "values": [1e15] * 60})


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
