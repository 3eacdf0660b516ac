"""Test errors in talking to other ranks, and errors that only sound like them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zlaunch.node.bootstrap import talk_of
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError
from zlaunch.runtime.errors import PeerLost
from zlaunch.supervisor.verdict import without_stacks

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24748"
)


@pytest.mark.parametrize(
    ("error", "talk"),
    [
        (RuntimeError(GLOO), "lost"),
        (PeerLost("rank 1 has gone"), "lost"),
        (CheckpointError(f"another rank failed during the checkpoint: {GLOO}"), "lost"),
        (CheckpointError("ckpt: no checkpoint found"), ""),
        (dist.DistBackendError("NCCL error: remote process exited"), "failed"),
        (dist.DistNetworkError("Broken pipe"), "failed"),
        (ConnectionResetError(104, "Connection reset by peer"), ""),
        (RuntimeError("download: Connection reset by peer"), ""),
        (FileNotFoundError(2, "No such file or directory", "/data/gloomy/shard1.bin"), ""),
        (ValueError("NCCL_DEBUG is not set"), ""),
        (BrokenPipeError(32, "Broken pipe"), ""),
    ],
)
def test_what_an_exception_says_of_other_ranks(error: Exception, talk: str) -> None:
    try:
        raise error
    except Exception as caught:
        assert talk_of(caught) == talk


def test_stacks_that_were_asked_for_are_no_cause() -> None:
    stacks = [
        "Thread 0x00007f (most recent call first):",
        '  File "a.py", line 3 in f',
        "  <no Python frame>",
    ]
    assert without_stacks(["step 5", *stacks, *stacks, "step 6"]) == ["step 5", "step 6"]
    crash = ["Fatal Python error: Segmentation fault", "", *stacks]
    assert without_stacks(["step 5", *crash]) == ["step 5", *crash]
