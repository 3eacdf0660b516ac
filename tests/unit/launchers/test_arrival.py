"""Test that nodes number themselves in the order in which they arrive."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.limits import FOR_EVER_S, LIMIT_S, wait_until
from tests.ports import reserved_port
from zlaunch.errors import LaunchError
from zlaunch.launchers.arrival import Arrival


@pytest.fixture
def at() -> Iterator[Arrival]:
    with reserved_port() as port:
        yield Arrival("127.0.0.1", port, is_own=True, nodes=3, workers=2, run="7")


class Nodes:
    """Starts nodes in threads and keeps what they say."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.said: list[str] = []

    def start(self, arrival: Arrival, limit_s: float = LIMIT_S) -> Future[int]:
        return self.pool.submit(arrival.number, limit_s, self.said.append)

    def await_words(self, words: str) -> None:
        wait_until(lambda: any(words in each for each in self.said), lambda: f"{words} in {self.said}")


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(ThreadPoolExecutor(max_workers=8))


def test_the_node_with_the_address_is_0_and_each_other_has_a_number(at: Arrival, nodes: Nodes) -> None:
    others = [nodes.start(replace(at, is_own=False)) for _ in range(2)]  # they come first
    first = nodes.start(at)
    assert first.result(LIMIT_S) == 0
    assert sorted(other.result(LIMIT_S) for other in others) == [1, 2]
    with socket.create_server(("127.0.0.1", at.port)):
        pass  # the port is free for the workers' rendezvous


def test_two_nodes_of_one_machine(at: Arrival, nodes: Nodes) -> None:
    """Both have the address; the second one finds the port taken."""
    found = [nodes.start(replace(at, nodes=2)) for _ in range(2)]
    assert sorted(each.result(LIMIT_S) for each in found) == [0, 1]


@pytest.mark.parametrize(
    "line",
    [b"[" * 4095 + b"\n", b"\xff\n", b"7\n", b"9" * 4096],
    ids=["brackets", "bytes", "number", "no end"],
)
def test_a_line_that_is_no_greeting_ends_only_its_connection(at: Arrival, nodes: Nodes, line: bytes) -> None:
    first = nodes.start(replace(at, nodes=2))
    with wait_until(lambda: connected(at.port), "node 0 listens") as stranger:
        stranger.sendall(line)
        assert stranger.recv(1) == b"", "it is no node"
    assert nodes.start(replace(at, nodes=2, is_own=False)).result(LIMIT_S) == 1
    assert first.result(LIMIT_S) == 0


def test_a_node_that_gives_up_is_not_counted(at: Arrival, nodes: Nodes) -> None:
    first = nodes.start(at)
    stranger = wait_until(lambda: connected(at.port), "node 0 listens")
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.recv(1) == b"", "it is no node"
    stranger.close()
    gone = wait_until(lambda: connected(at.port), "node 0 listens")
    gone.sendall(json.dumps({"nodes": 3, "workers": 2, "run": "7"}).encode() + b"\n")
    nodes.await_words("2 of 3 nodes are at")
    gone.close()
    others = [nodes.start(replace(at, is_own=False)) for _ in range(2)]
    assert first.result(LIMIT_S) == 0 and sorted(each.result(LIMIT_S) for each in others) == [1, 2]


def test_strangers_that_send_a_byte_and_stay_hold_nobody_up(
    at: Arrival, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlaunch.launchers.reception._LINE_S", FOR_EVER_S)
    first = nodes.start(at)
    strangers = [wait_until(lambda: connected(at.port), "node 0 listens")]
    strangers += [socket.create_connection(("127.0.0.1", at.port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(b"x")
    others = [nodes.start(replace(at, is_own=False)) for _ in range(2)]
    assert first.result(LIMIT_S) == 0 and sorted(other.result(LIMIT_S) for other in others) == [1, 2]
    for stranger in strangers:
        stranger.close()


def connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("other", "answer"),
    [
        ({"workers": 4}, "node 0 runs with --nproc_per_node 2; use the same on every node"),
        ({"run": "8", "nodes": 2}, "node 0 runs with --nnodes 3, --rdzv_id 7"),
    ],
)
def test_a_node_that_runs_something_else_is_refused(
    at: Arrival, nodes: Nodes, other: dict[str, object], answer: str
) -> None:
    first = nodes.start(at)
    with pytest.raises(LaunchError, match=answer):
        nodes.start(replace(at, is_own=False, **other)).result(LIMIT_S)  # type: ignore[arg-type]
    assert not first.done()
    others = [nodes.start(replace(at, is_own=False)) for _ in range(2)]
    assert first.result(LIMIT_S) == 0 and sorted(each.result(LIMIT_S) for each in others) == [1, 2]


def test_nodes_that_do_not_come(at: Arrival, nodes: Nodes) -> None:
    with pytest.raises(LaunchError, match=r"1 of 3 nodes came within 0.1 s; --rdzv_conf join_timeout"):
        at.number(0.1, nodes.said.append)
    ending = (
        r"not all 3 nodes came within 0.1 s, or no zlaunch runs there \(Connection refused\); --rdzv_conf"
    )
    with pytest.raises(LaunchError, match=ending):
        replace(at, is_own=False).number(0.1, nodes.said.append)


def test_why_node_0_cannot_be_reached_is_said_once(
    at: Arrival, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_address(*about: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("zlaunch.launchers.arrival._AGAIN_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    lost = replace(at, host="nosuchhost.invalid", is_own=False)
    with pytest.raises(LaunchError, match=r"no zlaunch runs there \(Name or service not known\); "):
        lost.number(0.1, nodes.said.append)
    assert nodes.said == [f"cannot reach {lost} yet: Name or service not known"]
