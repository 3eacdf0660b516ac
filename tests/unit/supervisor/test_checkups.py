"""Test what a launch finds out about the health of its nodes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.system.test_checkup import CHECKUP, FACTS, HOT
from zlaunch.errors import NodeError
from zlaunch.supervisor.checkups import find_unhealthy
from zlaunch.supervisor.nodes import AgentConnection, Node, connect
from zlaunch.system.checkup import Checkup
from zlaunch.system.gpu_health import GpuHealth, GpuReport
from zlaunch.system.messages import AgentEvent, CheckUp, CheckUpAnswer, Command, HelloAnswer, Pong
from zlaunch.transports.local import open_local
from zlaunch.view.console import Console

PONG = Pong("n", 0.0, 0, 0.0)


def node(host: str, checkup: Checkup | None, asked: list[Command]) -> Node:
    """A node that answers with this checkup, or whose agent has ended."""

    def ask(command: Command, answer: type) -> AgentEvent:
        if checkup is None:
            raise NodeError(host, "the agent ended")
        asked.append(command)
        return PONG if answer is Pong else CheckUpAnswer(checkup.as_event())

    link: Any = SimpleNamespace(host=host, ask=ask, transport=SimpleNamespace(kill=lambda: None))
    return Node(link, FACTS)


def find(nodes: Sequence[Node]) -> tuple[dict[str, str], str]:
    """Return the errors by host, and what the console shows."""
    err = io.BytesIO()
    console = Console([0], out=io.BytesIO(), err=err, terminal=False)
    errors = find_unhealthy(nodes, "/data", lambda node: ["0", "1"], console)
    return {error.host: error.text for error in errors}, err.getvalue().decode()


def test_bad_nodes_are_named_with_all_that_is_wrong() -> None:
    asked: list[Command] = []
    poor = replace(CHECKUP, memory_free_bytes=1 << 20, gpu_report=HOT, torch=None)
    errors, said = find([node("a", CHECKUP, asked), node("b", poor, asked), node("c", None, asked)])
    assert set(errors) == {"b", "c"} and errors["c"] == "it is not healthy: the agent ended"
    assert (
        "1 MiB of memory free" in errors["b"] and "GPU 1: 95 C" in errors["b"] and "torch" not in errors["b"]
    )
    assert "health of a: 64 GiB of memory and 100 GiB of disk free" in said
    (question, _) = (command for command in asked if isinstance(command, CheckUp))
    assert question.gpus == ["0", "1"] and question.workdir == "/data"


def test_each_node_reports_its_gpus() -> None:
    gpus = GpuReport(
        (
            GpuHealth("0", temperature_c=41, clock_mhz=345, max_clock_mhz=1980, ecc_errors=0, xids=(13,)),
            GpuHealth("1"),
        ),
        log_unknown="/dev/kmsg: Operation not permitted",
    )
    errors, said = find([node("a", replace(CHECKUP, gpu_report=gpus), [])])
    assert errors == {}
    assert "GPU 0 41 C, 345 of 1980 MHz, 0 ECC errors, Xid 13; GPU 1 ? C, ? of ? MHz, ? ECC errors" in said
    assert "Xid errors are unknown (/dev/kmsg: Operation not permitted)" in said


def test_an_agent_of_another_zlaunch_is_named_without_a_traceback(tmp_path: Path) -> None:
    link = AgentConnection(open_local("b", tmp_path / "stderr"))
    with pytest.raises(NodeError) as found:
        link.transport.send({"cmd": "checkup", "workdir": "/"})  # as an older launcher asks
        link.await_answer(CheckUpAnswer)
    assert found.value.host == "b" and found.value.text == (
        "the agent ended with exit code 1: the launcher's zlaunch sends checkup without 'gpus': "
        "install the same zlaunch here and there"
    )


NEWER = {"token": "0", "throttled_by": [], "xids": [], "speed": 1}
OLDER = """Traceback (most recent call last):
  File "/x/zlaunch/node/rendezvous.py", line 37, in handle
KeyError: 'gpus'"""


def test_an_agent_that_does_not_understand_a_command_is_named() -> None:
    transport: Any = SimpleNamespace(
        host="b",
        send=lambda message: None,
        events=lambda: iter(()),
        close=lambda timeout_s: 1,
        kill=lambda: None,
        diagnostics=lambda: OLDER,
    )
    errors, _ = find([Node(AgentConnection(transport), FACTS)])
    assert errors["b"].endswith(
        "its zlaunch is another one and ended with KeyError: 'gpus': install the same zlaunch as here"
    )


@pytest.mark.parametrize("change", [{"gpus": [NEWER]}, {}])
def test_an_answer_of_another_zlaunch_is_named(change: dict[str, Any]) -> None:
    event = CheckUpAnswer({**CHECKUP.as_event(), "gpu_report": change})
    link: Any = SimpleNamespace(
        host="b",
        ask=lambda command, answer: PONG if answer is Pong else event,
        transport=SimpleNamespace(kill=lambda: None),
    )
    errors, _ = find([Node(link, FACTS)])
    assert "answers" in errors["b"] and "install the same code as here" in errors["b"]


def test_a_greeting_of_another_zlaunch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = HelloAnswer({"type": "hello", "hostname": "b", "version": "9"})
    monkeypatch.setattr(AgentConnection, "ask", lambda link, command, answer: greeting)
    transport: Any = SimpleNamespace(host="b", events=lambda: iter(()))
    nodes, errors = connect(["b"], lambda host: transport, 9.0)
    assert nodes == [] and [(error.host, error.text) for error in errors] == [
        ("b", "its zlaunch answers without 'python': install the same zlaunch as here")
    ]
