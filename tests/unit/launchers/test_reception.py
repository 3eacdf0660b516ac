"""Test that a reception bounds what strangers may take of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.limits import LIMIT_S
from zlaunch.launchers import reception
from zlaunch.launchers.reception import Caller, Reception


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def call(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=LIMIT_S)


def heard(desk: Reception) -> list[Caller]:
    """Return the callers of the first round that has any."""
    while not (found := desk.heard(LIMIT_S)):
        pass
    return found


def test_lines_in_pieces_are_put_together(listener: socket.socket) -> None:
    with Reception(listener) as desk, call(listener) as slow, call(listener) as quick:
        slow.sendall(b"he")
        quick.sendall(b"hi\n")
        first = heard(desk)
        assert [bytes(caller.line) for caller in first] == [b"hi\n"]
        slow.sendall(b"llo\n")
        second = heard(desk)
        assert [bytes(caller.line) for caller in second] == [b"hello\n"]
        quick.close()
        assert heard(desk) == first, "it has hung up"
        desk.dismiss(first[0])


def test_a_line_without_an_end_is_cut(listener: socket.socket) -> None:
    with Reception(listener) as desk, call(listener) as stranger:
        stranger.sendall(b"x" * 2 * reception.LINE_BYTES)
        assert [len(caller.line) for caller in heard(desk)] == [reception.LINE_BYTES]


def test_a_byte_now_and_then_gives_no_more_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(reception, "time", SimpleNamespace(monotonic=lambda: now_s))
    with Reception(listener) as desk, call(listener) as stranger:
        assert desk.heard(LIMIT_S) == []
        while now_s < 4.0:
            now_s += 1.0
            stranger.sendall(b"x")
            assert desk.heard(LIMIT_S) == []
        now_s = 6.0
        stranger.sendall(b"\n")
        assert desk.heard(0.0) == []
        with suppress(ConnectionError):
            assert stranger.recv(1) == b"", "dismissed"


def test_the_oldest_silent_connection_makes_room(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_MOST_SILENT", 2)
    with Reception(listener) as desk, call(listener) as node:
        node.sendall(b"node\n")
        assert len(heard(desk)) == 1
        strangers = []
        for _ in range(3):
            strangers.append(call(listener))
            assert desk.heard(LIMIT_S) == []
        assert strangers[0].recv(1) == b"", "dismissed"
        strangers[2].sendall(b"hi\n")
        assert [bytes(caller.line) for caller in heard(desk)] == [b"hi\n"]
        for stranger in strangers:
            stranger.close()
