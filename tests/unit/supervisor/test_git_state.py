"""Test what is asked of git: real repositories, and programs in git's place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT_S, wait_until
from zlaunch.supervisor import git_state
from zlaunch.supervisor.git_state import read_git
from zlaunch.system.processes import start_ticks


def git(folder: Path, *words: str) -> str:
    """Run git with an identity of its own; give what it prints."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=trunk")
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of train.py, in a folder with a blank."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_clean_repository(repository: Path) -> None:
    state = read_git(repository, LIMIT_S)
    assert (state.root, state.branch, state.why) == (str(repository), "trunk", "")
    assert state.commit == git(repository, "rev-parse", "HEAD")
    assert (state.diff, state.is_cut, state.untracked) == (b"", False, ())
    git(repository, "checkout", "-q", "--detach")
    assert read_git(repository, LIMIT_S).branch == ""


def test_changes_are_found_from_a_folder_inside_and_can_be_applied(repository: Path, tmp_path: Path) -> None:
    inner = repository / "inner"
    inner.mkdir()
    (inner / "new.py").touch()
    (inner / "staged.py").write_text("x = 1\n")
    git(repository, "add", "inner/staged.py")
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "own\nfile").touch()
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "color.ui", "always")
    state = read_git(inner, LIMIT_S)
    assert state.root == str(repository)
    assert state.untracked == ("inner/new.py", "own\nfile")
    assert state.diff is not None and b"+lr = 2" in state.diff and b"+x = 1" in state.diff
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    (tmp_path / "git.diff").write_bytes(b"# zlaunch: a remark\n" + state.diff)
    git(copy, "apply", str(tmp_path / "git.diff"))
    assert (copy / "train.py").read_text() == "lr = 2\n" and (copy / "inner" / "staged.py").exists()


def test_a_long_diff_is_cut_at_a_line(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "train.py").write_text("x = 1\n" * 10_000)
    monkeypatch.setattr(git_state, "MOST_DIFF_BYTES", 1000)
    state = read_git(repository, LIMIT_S)
    assert state.diff is not None
    assert state.is_cut and 900 < len(state.diff) <= 1000 and state.diff.endswith(b"\n+x = 1\n")
    monkeypatch.setattr(git_state, "_MOST_UNTRACKED", 2)
    for name in "abcd":
        (repository / name).touch()
    state = read_git(repository, LIMIT_S)
    assert (state.untracked, state.not_listed) == (("a", "b"), 2)


def test_what_is_no_repository_or_has_no_commit(tmp_path: Path) -> None:
    assert "not a git repository" in read_git(tmp_path, LIMIT_S).why
    assert "cannot change to" in read_git(tmp_path / "nowhere", LIMIT_S).why
    git(tmp_path, "init", "-q")
    state = read_git(tmp_path, LIMIT_S)
    assert (state.why, state.root) == ("git: the repository has no commit yet", str(tmp_path))


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git(tmp_path, LIMIT_S).why == "git: it is not installed"


def test_a_git_that_hangs_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "git"
    fake.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/started\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read_git(tmp_path, 1.0).why == "git: no answer in time to `git rev-parse`"
    started = int((tmp_path / "started").read_text())
    wait_until(lambda: start_ticks(started) is None, "what it has started is gone")


def test_the_programs_that_a_repository_names_are_not_run(repository: Path, tmp_path: Path) -> None:
    program = f"touch {tmp_path}/was-run; cat"
    (repository / ".gitattributes").write_text("*.py diff=other\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository / "train.py").write_text("lr = 3\n")
    for key in ("core.fsmonitor", "diff.external", "diff.other.textconv", "diff.other.command"):
        git(repository, "config", key, program)
    state = read_git(repository, LIMIT_S)
    assert state.diff is not None and b"+lr = 3" in state.diff
    assert not (tmp_path / "was-run").exists()


def test_another_repository_of_the_environment_is_not_asked(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert read_git(repository, LIMIT_S).root == str(repository)
