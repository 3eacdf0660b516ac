"""Test that nothing is read from, or written to, folders that belong to another user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.ui.folders import write_run
from zlaunch.cli.main import main
from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import queue_folder
from zlaunch.supervisor.run_files import RunFiles
from zlaunch.sweep.trials import hold
from zlaunch.tuning.search import TuningResults
from zlaunch.ui.board import Board

STRANGER = 65533
OWNED = f"belongs to user {STRANGER}"

as_root = pytest.mark.needs("root")


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that links in folders of another user lead to."""
    path = tmp_path / "precious"
    path.write_text("keep me\n")
    return path


@pytest.fixture
def foreign(tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of another user in `runs`, the newest one, full of links."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = write_run(tmp_path / "runs", "theirs", started=2e9)
    for name in ("logs/rank_00000.log", "console.log", "report.html", f"launcher.{os.getpid()}"):
        (run / name).symlink_to(precious)
    give_away(run)
    return run


@as_root
@pytest.mark.parametrize(
    "command",
    ["ps", "stop", "stacks", "logs", "attach", "wait", "watch --once", "report", "bundle --dry_run"],
)
@pytest.mark.parametrize("name", ["theirs", "runs/theirs"])
def test_commands_refuse_a_run_of_another_user(
    foreign: Path, precious: Path, command: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), name]) == 2
    said = capfd.readouterr()
    assert OWNED in said.err and "keep me" not in said.out
    assert precious.read_text() == "keep me\n"


@as_root
def test_ps_lists_such_a_run_by_name_and_owner(foreign: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(foreign.parent, "mine")
    assert main(["ps"]) == 0
    assert "1 run that other users own or can change: --all" in capfd.readouterr().out
    assert main(["ps", "--all"]) == 0
    said = capfd.readouterr().out
    assert f"theirs: not shown, it {OWNED}" in said and "mine" in said
    assert main(["ps", "--all", "--json"]) == 0
    mine, theirs = json.loads(capfd.readouterr().out)
    assert (mine["run"], theirs["run"], theirs["why"]) == ("mine", "theirs", OWNED)
    assert main(["ps", "--clean", "-y"]) == 0
    said = capfd.readouterr().out
    assert f"stays: it {OWNED}" in said and "removed 1 run\n" in said
    assert (foreign / "events.jsonl").exists() and not (foreign.parent / "mine").exists()


@as_root
def test_last_is_this_users_newest_run(foreign: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(foreign.parent, "mine", exit_code=7)
    assert main(["wait", "last"]) == 7


@as_root
def test_ps_writes_no_end_into_such_a_run(foreign: Path, precious: Path) -> None:
    record = foreign / "launcher.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "ended": None, "started": 1.0}))
    (foreign / ".queue").mkdir()
    (foreign / ".queue" / "queued").touch()
    give_away(foreign)
    before = record.read_text()
    assert main(["ps", "--all"]) == 0
    assert record.read_text() == before and (foreign / ".queue" / "queued").exists()
    assert precious.read_text() == "keep me\n"


@as_root
def test_pages_name_such_a_run_and_open_nothing(foreign: Path) -> None:
    board = Board(foreign.parent)
    (shown,) = board.runs()
    assert (shown.key, shown.state, shown.why, shown.command) == ("theirs", "broken", OWNED, "")
    with pytest.raises(LaunchError, match=OWNED):
        board.open(["theirs"])


def test_a_run_writes_where_it_began(tmp_path: Path, precious: Path) -> None:
    """Another user who can write to the folder above puts a folder of links in the place of the run's."""
    run = tmp_path / "run"
    files = RunFiles(run, {0: "n1"}, print, goes_on=False, log_bytes=None)
    run.rename(tmp_path / "moved")
    (run / "logs").mkdir(parents=True)
    for name in ("logs/rank_00000.log", "events.jsonl", "logs/error_00000.json"):
        (run / name).symlink_to(precious)
    files.output(0, "stdout", b"printed\n")
    files.event({"type": "error_file", "rank": 0, "text": "failed"})
    files.close()
    assert precious.read_text() == "keep me\n"
    logs = tmp_path / "moved" / "logs"
    assert (logs / "rank_00000.log").read_text() == "printed\n"
    assert (logs / "error_00000.json").read_text() == "failed"


def test_errors_show_the_folders_name(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(OSError, match="logs") as caught:
        RunFiles(tmp_path, {0: "n1"}, print, goes_on=False, log_bytes=None)
    assert caught.value.filename == str(tmp_path / "logs")


@as_root
def test_the_queue_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo` may keep HOME: the daemon would run the user's jobs as root."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = queue_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    give_away(folder)
    with pytest.raises(LaunchError, match=f"{OWNED}; XDG_STATE_HOME=DIR moves it"):
        queue_folder()


@as_root
def test_folders_of_sweeps_and_tunings(tmp_path: Path, precious: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("sweep.json", "results.csv", "tuned.json", ".lock"):
        (folder / name).symlink_to(precious)
    give_away(folder)
    with pytest.raises(LaunchError, match=OWNED):
        hold(folder)
    with pytest.raises(LaunchError, match=OWNED):
        TuningResults(folder, {})
    assert precious.read_text() == "keep me\n"
