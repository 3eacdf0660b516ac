"""What the variables of pods mean."""

from __future__ import annotations

import click
import pytest

from zlaunch.cli.pods import Pod, half_said, read_pod

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
    ],
)
def test_what_does_not_fit_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(click.UsageError, match=words):
        read_pod(environ)


def test_variables_that_are_there_in_part_are_told() -> None:
    (warning,) = half_said({"WORLD_SIZE": "4", "RANK": "1"})
    assert "MASTER_ADDR" in warning and "alone" in warning
    assert not list(half_said({"WORLD_SIZE": "1"})) and not list(half_said(JOB))
    assert not list(half_said({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}))
