"""Test what a launch finds out about the health of its nodes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.unit.system.test_checkup import CHECKUP, FACTS, HOT
from zlaunch.errors import NodeError
from zlaunch.supervisor.checkups import find_unhealthy
from zlaunch.supervisor.nodes import Node
from zlaunch.system.checkup import Checkup
from zlaunch.system.gpu_health import GpuHealth, GpuReport
from zlaunch.view.console import Console


def node(host: str, checkup: Checkup | None, asked: list[dict[str, Any]]) -> Node:
    """A node that answers with this checkup, or whose agent has ended."""

    def ask(message: dict[str, Any], answer: str) -> dict[str, Any]:
        if checkup is None:
            raise NodeError(host, "the agent ended")
        asked.append(message)
        return {"type": "pong", "time": 0.0} if answer == "pong" else checkup.as_event()

    link: Any = SimpleNamespace(host=host, ask=ask, transport=SimpleNamespace(kill=lambda: None))
    return Node(link, FACTS)


def find(nodes: Sequence[Node]) -> tuple[dict[str, str], str]:
    """Return the errors by host, and what the console shows."""
    err = io.BytesIO()
    console = Console([0], out=io.BytesIO(), err=err, terminal=False)
    errors = find_unhealthy(nodes, "/data", lambda node: ["0", "1"], console)
    return {error.host: error.text for error in errors}, err.getvalue().decode()


def test_bad_nodes_are_named_with_all_that_is_wrong() -> None:
    asked: list[dict[str, Any]] = []
    poor = replace(CHECKUP, memory_free_bytes=1 << 20, gpu_report=HOT, torch=None)
    errors, said = find([node("a", CHECKUP, asked), node("b", poor, asked), node("c", None, asked)])
    assert set(errors) == {"b", "c"} and errors["c"] == "it is not healthy: the agent ended"
    assert (
        "1 MiB of memory free" in errors["b"] and "GPU 1: 95 C" in errors["b"] and "torch" not in errors["b"]
    )
    assert "health of a: 64 GiB of memory and 100 GiB of disk free" in said
    (question, _) = (message for message in asked if message["cmd"] == "checkup")
    assert question["gpus"] == ["0", "1"] and question["workdir"] == "/data"


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
