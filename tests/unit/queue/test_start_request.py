"""Test what the daemon and a job's own zlaunch say to each other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.limits import LIMIT_S
from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue.process_settings import ProcessSettings
from zlaunch.queue.start_request import StartRequest

REQUEST = StartRequest(
    folder="/queue/\udcff",
    job=3,
    attempt=1,
    run_id="run",
    lock=5,
    version="0.2.0",
    path="/x/zlaunch",
    settings=ProcessSettings(3, (0, 1), {"RLIMIT_NOFILE": (1, 2)}),
)


def test_a_request_arrives_as_it_was_sent() -> None:
    assert StartRequest.read(REQUEST.as_text()) == REQUEST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/queue", "runs an older zlaunch"),  # versions up to 0.2.0 begin with the queue's folder
        (
            json.dumps({"protocol": 99, "daemon": "9.9"}),
            f"zlaunch 9.9.* 99, and this job's zlaunch {__version__}",
        ),
        (json.dumps({"protocol": 1, "daemon": "9.9"}), "damaged"),
        (json.dumps({**json.loads(REQUEST.as_text()), "lock": "x"}), "damaged"),
    ],
)
def test_a_request_of_another_version_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(LaunchError, match=expected):
        StartRequest.read(text)


def test_the_launcher_that_refuses_a_request_ends_with_one_line() -> None:
    command = [
        sys.executable,
        "-m",
        "zlaunch.cli.queued",
        json.dumps({"protocol": 99, "daemon": "9.9"}),
        "x.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "zlaunch 9.9" in done.stderr
