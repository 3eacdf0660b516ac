"""Test what a save removes of what others have left in its folder."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from zlaunch.runtime.checkpoint.export import script
from zlaunch.runtime.checkpoint.format import commit as module
from zlaunch.runtime.checkpoint.format.commit import (
    SaveTarget,
    check_tag,
    new_owner,
    point_to,
    prepare,
    prune,
    put_in_place,
    replace_file,
)
from zlaunch.runtime.checkpoint.format.manifest import LATEST, MANIFEST, WHOLE
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

MINUTE_S = 60.0
HOUR_S = 3600.0
ENDED = 2**22 + 1
"""A process id beyond every process."""


def owner(*, host: str | None = None, space: str | None = None, pid: int | None = None) -> str:
    """The name of a save like one of this process, but for what is given."""
    _, *rest = new_owner().rsplit("-", 3)
    here, number = socket.gethostname(), rest[2]
    return f"{host or here}-{space or rest[0]}-{rest[1] if pid is None else pid}-{number}"


def left(folder: Path, of: str, age_s: float) -> Path:
    """The folder of a save that is not finished, last written some time ago."""
    path = folder / f".step1.{of}.tmp"
    path.mkdir()
    (path / "rank_00000.safetensors").write_bytes(b"half")
    moment = time.time() - age_s
    for entry in (path / "rank_00000.safetensors", path):
        os.utime(entry, (moment, moment))
    return path


def save_beside(folder: Path) -> None:
    prepare(SaveTarget(folder=folder, tag="step2", leader=True, owner=new_owner()))


def test_a_save_that_another_host_has_not_finished_stays(tmp_path: Path) -> None:
    """The process id says nothing about a process of another host: the file system is shared, ids are not."""
    mine = left(tmp_path, owner(pid=ENDED), MINUTE_S)
    others = [
        left(tmp_path, owner(host=f"{socket.gethostname()}2", pid=ENDED), MINUTE_S),
        left(tmp_path, owner(host="a", pid=ENDED), MINUTE_S),
        left(tmp_path, owner(space="1", pid=ENDED), MINUTE_S),  # of another container on this host
    ]
    save_beside(tmp_path)
    assert not mine.exists() and all(path.exists() for path in others)


def test_a_save_of_a_living_process_and_one_that_has_just_ended_stay(tmp_path: Path) -> None:
    living = left(tmp_path, owner(), MINUTE_S)
    just = left(tmp_path, owner(pid=ENDED), 0.0)
    save_beside(tmp_path)
    assert living.exists() and just.exists()


def test_a_save_that_nobody_has_written_to_for_long_goes_whoever_it_was(tmp_path: Path) -> None:
    old = [left(tmp_path, of, 2 * HOUR_S) for of in (owner(host="a"), owner())]
    save_beside(tmp_path)
    assert not any(path.exists() for path in old)


def test_the_age_of_a_save_is_that_of_its_newest_file(tmp_path: Path) -> None:
    """Files of a long save are written while the folder's own time stands still."""
    path = left(tmp_path, owner(host="a"), 2 * HOUR_S)
    os.utime(path / "rank_00000.safetensors")
    save_beside(tmp_path)
    assert path.exists()


def test_a_folder_with_files_of_the_user_stays(tmp_path: Path) -> None:
    path = left(tmp_path, owner(pid=ENDED), 2 * HOUR_S)
    (path / "notes.txt").write_text("mine")
    save_beside(tmp_path)
    assert (path / "notes.txt").exists()


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step2").mkdir()
    (tmp_path / "step2" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint: use another tag"):
        save_beside(tmp_path)
    assert (tmp_path / "step2" / "notes.txt").read_text() == "mine"


def test_half_a_small_file_of_a_dead_process_goes_and_others_stay(tmp_path: Path) -> None:
    mine = tmp_path / f".{LATEST}.{owner(pid=ENDED)}.new"
    other = tmp_path / f".{LATEST}.{owner(host='a', pid=ENDED)}.new"
    for path in (mine, other):
        path.write_bytes(b"st")
    replace_file(tmp_path / LATEST, b"step1")
    assert (tmp_path / LATEST).read_bytes() == b"step1"
    assert not mine.exists() and other.exists()


def written(target: SaveTarget, text: str) -> None:
    """Write a checkpoint that holds one text."""
    prepare(target)
    (target.temporary / MANIFEST).write_text("{}")
    (target.temporary / WHOLE).write_text(text)
    put_in_place(target.temporary, target.folder / target.tag)


def test_a_tag_that_is_saved_again_keeps_the_files_that_others_put_there(tmp_path: Path) -> None:
    for text in ("first", "second"):
        written(SaveTarget(folder=tmp_path, tag="best", leader=True, owner=new_owner()), text)
        (tmp_path / "best" / f"{text}.txt").touch()
    assert (tmp_path / "best" / WHOLE).read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]
    assert (tmp_path / "best" / "first.txt").exists()


def test_only_numbered_tags_alike_are_pruned_and_never_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "candidates", lambda folder: sorted(folder.glob("[!.]*"), reverse=True))
    for tag in ("best", "step1", "step2", "step3", "step4", "other1"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / MANIFEST).write_text("{}")
    (tmp_path / "step2" / "notes.txt").write_text("mine")
    (tmp_path / LATEST).write_text("step1")
    prune(SaveTarget(folder=tmp_path, tag="step4", leader=True, owner=new_owner(), keep_last=1))
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    kept = {path.name: sorted(entry.name for entry in path.iterdir()) for path in folders}
    assert kept == {
        "best": [MANIFEST],
        "other1": [MANIFEST],
        "step1": [MANIFEST],
        "step2": ["notes.txt"],
        "step4": [MANIFEST],
    }


def test_latest_names_the_tag_and_the_script_beside_it_can_be_run(tmp_path: Path) -> None:
    point_to(SaveTarget(folder=tmp_path, tag="step7", leader=True, owner=new_owner()))
    assert (tmp_path / LATEST).read_text() == "step7"
    assert os.access(tmp_path / script.NAME, os.X_OK)


@pytest.mark.parametrize("tag", ["", " a", "a/b", ".a", "latest", "auto", "a\0"])
def test_a_tag_that_could_not_be_found_again_is_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="must be a plain folder name"):
        check_tag(tag)
