"""Test what a record says about the end of a run, whichever version has written it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, get_args

import pytest

from zlaunch.supervisor import run_folder
from zlaunch.supervisor.end import Cause, End
from zlaunch.supervisor.found_runs import FoundRun


@pytest.mark.parametrize("cause", get_args(Cause))
def test_an_end_is_read_as_it_was_written(cause: Cause) -> None:
    end = End(3, cause, ("n1", "n2"), (("n3", 0), ("n3", 7)))
    assert End.from_json(json.loads(json.dumps(end.as_json()))) == end


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ({"exit_code": 1, "cause": "of a later version"}, End(1, "failed")),
        ({"exit_code": 1, "cause": ["lost"]}, End(1, "failed")),
        (
            {"exit_code": 2, "cause": "host refused", "bad_hosts": ["n1", 7, None]},
            End(2, "host refused", ("n1",)),
        ),
        ({"exit_code": 2, "cause": "host refused", "bad_hosts": "n1"}, End(2, "host refused")),
        (
            {"exit_code": 1, "cause": "host refused", "bad_slots": [["n1", 2], ["n1"], ["n1", "3"], 4]},
            End(1, "host refused", slots=(("n1", 2),)),
        ),
        ({"exit_code": 1, "cause": "host refused", "bad_slots": 3}, End(1, "host refused")),
        ({"exit_code": 0}, End(0, "finished")),
        ({"exit_code": 1}, End(1, "failed")),
        ({"exit_code": 2}, End(2, "refused")),
        ({"exit_code": 75}, End(75, "saved")),
        ({"exit_code": 143}, End(143, "stopped")),
        ({"exit_code": 137}, End(137, "failed")),
        ({"exit_code": None, "cause": "lost"}, None),
        ({"exit_code": True}, None),
        ({}, None),
    ],
)
def test_what_other_versions_and_damaged_files_say(content: dict[str, Any], end: End | None) -> None:
    assert End.from_json(content) == end


def shown(folder: Path, end: End) -> str:
    run_folder.ended(str(folder), end)
    record = run_folder.read(folder)
    assert record is not None and record.end == end
    return FoundRun("run", folder, record).shown_state


def test_the_cause_stands_beside_the_code(tmp_path: Path) -> None:
    run_folder.begun(str(tmp_path), "id", ["n1"], 1)
    assert shown(tmp_path, End(0, "finished")) == "ended 0"
    assert shown(tmp_path, End(143, "failed")) == "ended 143 (failed)"
    assert shown(tmp_path, End(143, "stopped")) == "ended 143 (stopped by SIGTERM)"
    assert shown(tmp_path, End(143, "timed out")) == "ended 143 (timed out)"
    assert shown(tmp_path, End(2, "host refused", ("n1", "n2"))) == "ended 2 (host refused: n1, n2)"
    both = End(1, "host refused", ("n1",), (("n2", 0), ("n2", 3)))
    assert shown(tmp_path, both) == "ended 1 (host refused: n1, n2:0, n2:3)"


def test_a_record_of_an_older_version_is_read(tmp_path: Path) -> None:
    run_folder.begun(str(tmp_path), "id", ["n1"], 1)
    run_folder.ended(str(tmp_path), End(128 + signal.SIGINT, "stopped"))
    path = tmp_path / "launcher.json"
    content = json.loads(path.read_text())
    del content["cause"], content["bad_hosts"], content["bad_slots"]
    path.write_text(json.dumps(content))
    record = run_folder.read(tmp_path)
    assert record is not None and record.end == End(130, "stopped")


def test_the_end_of_a_launch_that_was_refused_before_it_began(tmp_path: Path) -> None:
    assert run_folder.own_end(str(tmp_path), 2) == End(2, "refused")
    run_folder.begun(str(tmp_path), "id", ["n1"], 1)
    run_folder.ended(str(tmp_path), End(2, "host refused", ("n1",)))
    assert run_folder.own_end(str(tmp_path), 2) == End(2, "host refused", ("n1",))
    path = tmp_path / "launcher.json"
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
    assert run_folder.own_end(str(tmp_path), 2) == End(2, "refused"), "that was another process's end"
