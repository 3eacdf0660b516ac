"""Test how `zlaunch queue` and `zlaunch ui` show a job."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.queue import job_text


@pytest.mark.parametrize(
    ("options", "command", "shown"),
    [
        ((), "train.py --lr 1", "train.py --lr 1"),
        (("--name", "a"), "train.py", "a: train.py"),
        (("--name=b", "--quiet"), "train.py", "b: train.py"),
        ((), "train.py --config ds.json --epochs 100 --data somewhere --lr 0.25", "--lr 0.25"),
    ],
)
def test_a_command_keeps_its_script_its_end_and_its_name(
    options: tuple[str, ...], command: str, shown: str
) -> None:
    submission = SimpleNamespace(options=options, command=command.split())
    job: Any = SimpleNamespace(submission=submission, submitted=time.time())
    text = job_text._command(job)
    assert text.endswith(shown) and "train.py" in text and len(text) <= 60
