"""Test what the list of runs reads, when, and what it keeps in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ui.folders import STARTED, append, reported, write_run
from zlaunch.errors import LaunchError
from zlaunch.supervisor.found_runs import FoundRun, look_into
from zlaunch.system.processes import start_ticks
from zlaunch.ui import board as room
from zlaunch.ui.board import Board
from zlaunch.ui.run_pages import RunReader


@pytest.fixture(autouse=True)
def _queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_newest_run_first_and_broken_ones_last(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_run(folder, "old")
    write_run(folder, "new", steps=4, started=STARTED + 9, exit_code=3)
    write_run(folder, "step/inner", started=STARTED + 5)
    write_run(folder, "far", started=1e300)
    (folder / "broken").mkdir()
    (folder / "broken" / "launcher.json").write_text("{")
    (folder / "empty").mkdir()
    runs = Board(folder).runs()
    assert [run.key for run in runs] == ["new", "step/inner", "old", "broken", "far"]
    new, _, old, broken, far = runs
    assert (new.state, new.step, new.steps, new.losses) == ("ended 3", 4, 4, (4.0, 2.0, 4 / 3, 1.0))
    assert (old.state, old.workers, old.hosts, old.command) == ("ended 0", 1, ("n1",), "train.py --lr 1")
    assert (broken.state, broken.why) == ("broken", "its launcher.json cannot be read")
    assert far.state == "broken" and far.why, "a time that no calendar has"


def test_a_run_is_read_again_only_where_its_events_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, "run")
    made: list[RunReader] = []

    class Counted(RunReader):
        def __init__(self, run: FoundRun) -> None:
            super().__init__(run)
            made.append(self)

    monkeypatch.setattr(room, "RunReader", Counted)
    board = Board(tmp_path)
    assert board.runs() == board.runs() and len(made) == 1
    append(path, reported(9, 9))
    (run,) = board.runs()
    assert run.step == 9 and len(made) == 2


def test_a_running_run_is_followed_and_its_end_is_seen(tmp_path: Path) -> None:
    pid = os.getpid()
    alive: dict[str, Any] = {"pid": pid, "start_ticks": start_ticks(pid), "ended": None, "exit_code": None}
    path = write_run(tmp_path, "run", **alive)
    board = Board(tmp_path)
    (run,) = board.runs()
    assert (run.state, run.step, run.left_s) == ("running", 3, 0.0)
    append(path, reported(4, 8))
    (run,) = board.runs()
    assert (run.step, run.steps, run.left_s) == (4, 8, 4.0)
    record = path / "launcher.json"
    record.write_text(
        record.read_text().replace('"ended": null', '"ended": 1').replace('code": null', 'code": 7')
    )
    (run,) = board.runs()
    assert (run.state, run.step) == ("ended 7", 4)


def test_an_answer_reads_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_run(tmp_path, f"run{number}", steps=600 if number else 3, started=STARTED + number)
    monkeypatch.setattr(room, "_LIST_S", 1e-9)
    board = Board(tmp_path)
    seen = board.runs()
    assert [run.is_read for run in seen] == [False] * 3 and seen[0].state == "ended 0"
    monkeypatch.setattr(room, "_LIST_S", 60.0)
    assert [(run.is_read, run.step) for run in board.runs()] == [(True, 600), (True, 600), (True, 3)]
    reader = RunReader(look_into(tmp_path)[0][-1])
    assert not reader.advance(0.0) and (reader.progress.step or 0) < 600
    assert reader.advance() and reader.progress.step == 600, "it goes on where it stopped"


def test_long_curves_keep_their_last_point(tmp_path: Path) -> None:
    write_run(tmp_path, "run", steps=500)
    (run,) = Board(tmp_path).runs()
    assert len(run.losses) == 60 and (run.losses[0], run.losses[-1]) == (4.0, 4.0 / 500)


def test_only_runs_of_the_folder_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_run(folder, "run", log="first\npassword=topsecret123\nlast\n")
    write_run(tmp_path, "outside")
    board = Board(folder)
    (opened,) = board.open(["run"])
    assert opened.log.splitlines()[::2] == ["first", "last"] and "topsecret123" not in opened.log
    for name in ("../outside", str(tmp_path / "outside"), "", "/etc", "run/../../outside"):
        with pytest.raises(LaunchError, match="there is no run"):
            board.open([name])


def test_of_a_long_log_the_end(tmp_path: Path) -> None:
    write_run(tmp_path, "run", log="".join(f"line {number}\n" for number in range(10_000)))
    (opened,) = Board(tmp_path).open(["run"])
    lines = opened.log.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (40, "line 9960", "line 9999")


def test_another_run_in_the_same_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path, "run", steps=9)
    board = Board(tmp_path)
    assert board.runs()[0].step == 9 and board.open(["run"])[0].page.progress.step == 9
    for file in ("launcher.json", "events.jsonl"):
        (path / file).unlink()
    (path / "logs").rmdir()
    write_run(tmp_path, "run", run_id="another", steps=2)
    assert board.runs()[0].losses == (4.0, 2.0) and board.open(["run"])[0].page.progress.step == 2
