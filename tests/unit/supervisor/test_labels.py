"""Test names and tags of runs: what is accepted, kept, shown, and found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.ui.folders import STARTED, write_run
from zlaunch.cli.main import main
from zlaunch.errors import LaunchError
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import find_run, meant
from zlaunch.supervisor.run_folder import Labels
from zlaunch.ui.board import Board
from zlaunch.ui.pages import list_page


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, which is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "runs"


def test_a_name_means_the_newest_run_that_has_it(runs: Path) -> None:
    write_run(runs, "2026-aaa", name="baseline", started=STARTED)
    write_run(runs, "2026-bbb", name="baseline", started=STARTED + 9)
    write_run(runs, "2026-ccc", name="base", started=STARTED + 20)
    assert meant("baseline") == "runs/2026-bbb"
    assert meant("base") == "runs/2026-ccc", "a whole name, not the beginning of others"
    write_run(runs, "base2-ddd", started=STARTED + 30)
    assert meant("base") == "runs/2026-ccc", "before the beginning of a folder's name"
    assert meant("last") == "runs/base2-ddd"
    with pytest.raises(LaunchError, match="did you mean 'baseline'"):
        find_run(meant("baselin"))


def test_files_and_folders_that_are_no_run_hide_none(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, label in (("2026-aaa", "data"), ("2026-bbb", "hi.py"), ("2026-ccc", "runs"), ("old-ddd", "")):
        write_run(runs, name, name=label)
    for name in ("data", "2026-ccc", "old"):
        (runs.parent / name).mkdir()
    (runs.parent / "hi.py").touch()
    assert find_run(meant("data")).path == Path("runs/2026-aaa")
    assert find_run(meant("hi.py")).path == Path("runs/2026-bbb")
    assert find_run(meant("runs")).path == find_run(meant("2026-ccc")).path == Path("runs/2026-ccc")
    assert meant("old") == "runs/old-ddd"
    assert meant("./data") == "./data", "a word with a slash is a path"
    assert main(["ps", "2026-ccc"]) == 0 and "2026-ccc (runs): ended 0" in capsys.readouterr().out
    assert main(["ps", "--all"]) == 0 and "old-ddd" in capsys.readouterr().out, "the folder is the default"
    write_run(runs.parent / "old", "2025-eee")
    assert meant("old") == "old", "a folder of runs, before the beginning of a name"
    write_run(runs.parent / "old", "2025-fff", name="elsewhere")
    with pytest.raises(LaunchError, match="no run 'elsewhere'"):
        find_run(meant("elsewhere"))


def test_a_folder_with_the_name_of_another_run_is_ambiguous(runs: Path) -> None:
    write_run(runs, "base", name="base", started=STARTED)
    assert meant("base") == "base", "its own name"
    write_run(runs, "2026-bbb", name="base", started=STARTED + 9)
    with pytest.raises(LaunchError, match="and the name of another: use runs/base or runs/2026-bbb"):
        meant("base")
    assert meant("runs/base") == "runs/base"
    write_run(runs.parent, "own")
    write_run(runs, "2026-ccc", name="own", started=STARTED + 10)
    with pytest.raises(LaunchError, match=r"use \./own or runs/2026-ccc"):
        meant("own")


def test_the_id_of_a_slurm_job_means_its_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, task in (("11", "2"), ("12", "1"), ("13", "")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        for name, value in (("SLURM_ARRAY_JOB_ID", "11"), ("SLURM_ARRAY_TASK_ID", task)):
            monkeypatch.setenv(name, value)
        (runs / f"2026-a{job}").mkdir(parents=True)
        run_folder.begun(str(runs / f"2026-a{job}"), job, ["n1"], 1)
    assert [meant(text) for text in ("11_1", "12", "11_2", "13")] == [
        f"runs/2026-a{job}" for job in (12, 12, 11, 13)
    ]
    # SLURM gives the last task the array's own id
    with pytest.raises(
        LaunchError, match="SLURM job 11 is an array: name one of its tasks, such as 11_1, 11_2"
    ):
        meant("11")
    assert main(["ps", "12"]) == 0
    assert "SLURM job 11_1" in " ".join(capsys.readouterr().out.split())
    assert main(["ps", "13"]) == 0
    assert "SLURM job 13" in " ".join(capsys.readouterr().out.split())
    for name in ("2026-b14", "2026-c14"):
        write_run(runs, name, slurm_job="14")
    with pytest.raises(LaunchError, match="SLURM job 14 has 2 runs, such as 2026-b14, 2026-c14"):
        meant("14")
    write_run(runs, "2026-14d", name="x")
    with pytest.raises(LaunchError, match="SLURM job 14 has 2 runs"):
        meant("14")
    assert meant("14d") == "runs/2026-14d"


def test_labels_outlive_the_attempts_and_not_the_run(tmp_path: Path) -> None:
    run_folder.queued(str(tmp_path), "id", ["n1"], 1, ["x.py"], Labels("nightly", ("a", "b")))
    run_folder.begun(str(tmp_path), "id", ["n1"], 1, 1)  # as an attempt begins
    record = run_folder.read(tmp_path)
    assert record is not None
    assert (record.name, record.tags, record.label) == ("nightly", ("a", "b"), "nightly #a #b")
    run_folder.begun(str(tmp_path), "another", ["n1"], 1)
    record = run_folder.read(tmp_path)
    assert record is not None and record.label == ""


@pytest.mark.parametrize("word", ["", "last", "latest", "-x", "a b", "a/b", "x" * 65, "é", "a\n"])
@pytest.mark.parametrize("option", ["name", "tag"])
def test_what_is_no_label_is_refused(
    runs: Path, word: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs.parent / "x.py").touch()
    for command in ([], ["submit"]):
        assert main([*command, f"--{option}={word}", "x.py"]) == 2
        assert f"is not a {option}: use up to 64 letters" in capsys.readouterr().err
    assert not runs.exists()


def test_ps_and_the_pages_show_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, "plain")
    assert main(["ps", "--all"]) == 0
    assert " name " not in capsys.readouterr().out
    write_run(runs, "labelled", name="wide", tags=["lr=3e-4"], started=STARTED + 5)
    assert main(["ps", "--all"]) == 0
    out = capsys.readouterr().out
    assert " name " in out and "wide #lr=3e-4" in out
    assert main(["ps", "wide"]) == 0
    assert "labelled (wide #lr=3e-4): ended 0" in " ".join(capsys.readouterr().out.split())
    assert main(["ps", "--all", "--json"]) == 0
    assert {run["run"]: (run["name"], run["tags"]) for run in json.loads(capsys.readouterr().out)} == {
        "plain": ("", []),
        "labelled": ("wide", ["lr=3e-4"]),
    }
    board = Board(runs)
    page = str(list_page(board, board.runs()).main)
    assert 'data-name="labelled wide #lr=3e-4 ended 0' in page
    assert '<span class="soft">wide #lr=3e-4</span>' in page
    git = {"commit": "0a1b2c", "branch": "trunk", "dirty": True}
    provenance = {"git": git, "seed": "7"}
    (runs / "labelled" / "provenance.json").write_text(json.dumps(provenance))
    assert main(["report", "wide"]) == 0
    report = (runs / "labelled" / "report.html").read_text()
    assert "<td>commit</td><td>0a1b2c on trunk, with uncommitted changes</td>" in report
    assert "<td>seed</td><td>7</td>" in report
    assert "<td>name</td><td>wide #lr=3e-4</td>" in report
    assert "<title>wide #lr=3e-4 (" in report
