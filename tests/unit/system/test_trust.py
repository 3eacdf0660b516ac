"""Test zlaunch.runtime.trust: which folders are acted upon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zlaunch.runtime.trust import Folder, UntrustedError, check_folder, make_folder

STRANGER = 65533

as_root = pytest.mark.needs("root")


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def test_a_new_folder_is_for_this_user_alone(tmp_path: Path) -> None:
    make_folder(tmp_path / "runs" / "new")
    make_folder(tmp_path / "runs" / "new")
    assert (tmp_path / "runs" / "new").stat().st_mode & 0o777 == 0o700


@as_root
def test_folders_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    give_away(folder)
    for act in (check_folder, make_folder):
        with pytest.raises(UntrustedError, match=f"run belongs to user {STRANGER}$"):
            act(folder)


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o772])
def test_folders_that_others_can_write_to(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UntrustedError, match=rf"mode {mode:04o}\): run `chmod go-w`"):
        check_folder(folder)
    folder.chmod(mode & ~0o022)
    check_folder(folder)
    assert not list(folder.iterdir())


@as_root
def test_a_link_is_followed_if_it_is_ones_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("run")
    check_folder(link)
    give_away(link)
    with pytest.raises(UntrustedError, match=f"latest is a link that belongs to user {STRANGER}"):
        check_folder(link)
    link.unlink()
    link.symlink_to("run")
    give_away(tmp_path / "run")
    with pytest.raises(UntrustedError, match="run belongs to"):
        check_folder(link)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_folder(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        check_folder(tmp_path / "none")


@as_root
def test_the_owner_cannot_put_something_else_in_the_place_of_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    give_away(folder)
    opened = os.open
    made = os.mkdir

    def swap(name: str, dir_fd: int | None) -> None:
        os.rename(name, f"{name}.away", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        made(name, dir_fd=dir_fd)
        os.chown(name, STRANGER, STRANGER, dir_fd=dir_fd)

    def open_and_swap(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = opened(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            swap(path, dir_fd)
        return fd

    def make_and_swap(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        made(path, mode, dir_fd=dir_fd)
        swap(path, dir_fd)

    monkeypatch.setattr(os, "open", open_and_swap)
    monkeypatch.setattr(os, "mkdir", make_and_swap)
    with pytest.raises(UntrustedError, match="run belongs to"):
        check_folder(folder)


def test_errors_inside_a_folder_show_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, Folder(tmp_path) as folder:
        (folder.path / "none").read_text()
    assert caught.value.filename == str(tmp_path / "none")


def test_the_path_leads_to_what_was_checked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Folder(folder) as checked:
        folder.rename(tmp_path / "moved")
        folder.mkdir()  # what another user could put there
        (checked.path / "file").touch()
    assert (tmp_path / "moved" / "file").exists() and not (folder / "file").exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        folder.write("note", b"one", 0o600)
        folder.write("note", b"two")
        (tmp_path / "taken").mkdir()
        with pytest.raises(IsADirectoryError):
            folder.write("taken", b"x")
    assert (tmp_path / "note").read_bytes() == b"two"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["note", "taken"], "no half of a file stays"
