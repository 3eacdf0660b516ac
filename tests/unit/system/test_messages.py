"""Test that messages survive the way over the wire, and what becomes of those that are not as expected."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from zlaunch.system import events
from zlaunch.system.messages import (
    AGENT_EVENT_TYPES,
    COMMAND_TYPES,
    WORKER_EVENT_TYPES,
    AgentEvent,
    CheckUp,
    Command,
    Debugger,
    Done,
    Exited,
    FromScript,
    HelloAnswer,
    Kill,
    MissingField,
    Other,
    Packages,
    Ping,
    Raised,
    Start,
    Stop,
    Sweep,
    WorkerEvent,
    decode_command,
    decode_event,
    decode_worker_event,
    encode_command,
    encode_event,
)


def test_every_type_of_message_has_a_kind() -> None:
    own_form = {"Start", "Output", "HelloAnswer", "CheckUpAnswer", "Other"}
    for union, kinds in (
        (Command, COMMAND_TYPES),
        (AgentEvent, AGENT_EVENT_TYPES),
        (WorkerEvent, WORKER_EVENT_TYPES),
    ):
        assert {each.__name__ for each in get_args(union)} - own_form == {
            each.__name__ for each in kinds.values()
        }
    assert set(WORKER_EVENT_TYPES) == set(events.WORKER_EVENTS)


@pytest.mark.parametrize(
    ("command", "wire"),
    [
        (Ping(), {"cmd": "ping"}),
        (Ping(9.5, 2), {"cmd": "ping", "lease": 9.5, "pauses": 2}),
        (Stop(3.0), {"cmd": "stop", "grace_s": 3.0}),
        (Kill(), {"cmd": "kill"}),
        (
            Sweep("id", [[5, 6]], 7, 10.0),  # type: ignore[list-item]  # JSON makes lists of tuples
            {"cmd": "sweep", "run_id": "id", "sessions": [[5, 6]], "pid_namespace": 7, "idle_s": 10.0},
        ),
        (
            CheckUp("/w", ["0"], None),
            {"cmd": "checkup", "workdir": "/w", "nccl_setting": None, "gpus": ["0"]},
        ),
        (Start({"run_id": "id"}, None), {"run_id": "id", "lease": None}),
    ],
)
def test_commands(command: Command, wire: dict[str, Any]) -> None:
    assert encode_command(command) == wire
    assert decode_command(json.loads(json.dumps(wire))) == command


@pytest.mark.parametrize(
    ("event", "wire"),
    [
        (Done("n", 0, True, 1.5), {"type": "done", "host": "n", "swept": 0, "stays": True, "time": 1.5}),
        (Packages("n", 1.5, why="no"), {"type": "packages", "host": "n", "time": 1.5, "why": "no"}),
        (FromScript(3, {"type": "snapshot"}), {"type": "script", "rank": 3, "event": {"type": "snapshot"}}),
        (HelloAnswer({"type": "hello", "python": "3"}), {"type": "hello", "python": "3"}),
        (Other({"type": "x", "y": 1}), {"type": "x", "y": 1}),
    ],
)
def test_events(event: AgentEvent, wire: dict[str, Any]) -> None:
    assert encode_event(event) == wire
    assert decode_event({**wire}) == event


def test_unknown_fields_are_ignored_and_missing_ones_named() -> None:
    wire = encode_event(Exited("n", 0, 7, 1, "", False, 1.5))
    assert decode_event({**wire, "new": 1}) == Exited("n", 0, 7, 1, "", False, 1.5)
    del wire["returncode"]
    with pytest.raises(MissingField, match="exit without 'returncode'"):
        decode_event(wire)
    with pytest.raises(MissingField, match="sweep without 'sessions'"):
        decode_command({"cmd": "sweep", "run_id": "x", "idle_s": 1.0})


@pytest.mark.parametrize("kind", ["new", "", 3, ["stop"]])
def test_an_unknown_command_is_none(kind: Any) -> None:
    assert decode_command({"cmd": kind, "grace_s": 1.0}) is None


def test_scripts_may_leave_out_everything() -> None:
    about = {"rank": 2, "host": "n"}
    for kind, expected in WORKER_EVENT_TYPES.items():
        assert type(decode_worker_event({"type": kind, **about})) is expected
    assert decode_worker_event({"type": "exception", **about, "talk": ["odd"]}) == Raised(
        2, "n", talk=["odd"]
    )
    assert decode_worker_event({"type": "debugger", **about, "port": 5}) == Debugger(2, "n", port=5)
