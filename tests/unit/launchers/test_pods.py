"""Test what the variables of pods mean."""

from __future__ import annotations

import os
from typing import Any

import pytest

from zlaunch.errors import LaunchError
from zlaunch.launchers.found import Pod, half_said, read_pod, take_pod

JOB = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("environ", "pod"),
    [
        ({}, None),
        (JOB, Pod(2, 4, None, "job-master-0", 23456)),
        ({**JOB, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**JOB, "LOCAL_RANK": "0"}, None),
        ({**JOB, "ZLAUNCH_RUN_ID": "x"}, None),
        (
            {**JOB, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
            Pod(1, 2, 8, "job-master-0", 23456),
        ),
        ({"PET_NNODES": "2:2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}, Pod(0, 2, None, "a", 0)),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "head:77"},
            Pod(0, 2, None, "head", 77),
        ),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", **JOB}, None),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "[::1]:29"},
            Pod(0, 2, None, "::1", 29),
        ),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "head"}, Pod(0, 2, None, "head", 0)),
        ({**JOB, "PET_NPROC_PER_NODE": "auto"}, Pod(2, 4, None, "job-master-0", 23456)),
    ],
)
def test_the_place_of_a_pod(environ: dict[str, str], pod: Pod | None) -> None:
    assert read_pod(environ) == pod


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PET_NNODES": "1:4"}, "elastic"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a"}, "PET_NODE_RANK is not"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"PET_NNODES": "two"}, "PET_NNODES=two: not a number"),
        ({**JOB, "RANK": "4"}, "node 4 of 4"),
        ({**JOB, "PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0: 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_pod(environ)


def test_variables_that_are_there_in_part_are_told() -> None:
    (warning,) = half_said({"WORLD_SIZE": "4", "RANK": "1"})
    assert "MASTER_ADDR" in warning and "alone" in warning
    assert not list(half_said({"WORLD_SIZE": "1"})) and not list(half_said(JOB))
    assert not list(half_said({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}))


NAMES = "hostfile launcher node_rank include exclude num_nodes num_processes num_gpus master_addr"
GIVEN: dict[str, Any] = {**dict.fromkeys(NAMES.split()), "master_port": 0}


def taken(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], **given: Any) -> dict[str, Any]:
    for name in list(os.environ):
        if name.startswith("PET_") or name in (*JOB, "LOCAL_RANK", "ZLAUNCH_RUN_ID"):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = {**GIVEN, **given}
    take_pod(result, None)
    return result


def test_options_go_before_what_a_pod_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(monkeypatch, JOB, num_gpus=3, master_port=7)
    assert (found["node_rank"], found["num_nodes"], found["master_addr"]) == (2, 4, "job-master-0")
    assert (found["num_gpus"], found["master_port"]) == (3, 7)
    assert taken(monkeypatch, JOB, num_nodes=4)["pod"] is True
    assert taken(monkeypatch, JOB, launcher="local")["pod"] is False


def test_a_single_pod_has_as_many_workers_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "3"})["num_gpus"] == 3
    assert taken(monkeypatch, {"PET_NPROC_PER_NODE": "3"}, include="localhost:0")["num_gpus"] is None


@pytest.mark.parametrize("option", [{"include": "localhost:0"}, {"num_nodes": 3}, {"num_processes": 8}])
def test_what_contradicts_a_pod_is_refused(monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="node 2 of 4"):
        taken(monkeypatch, JOB, **option)
