"""Open only folders that no other user can have filled: of runs, of calls, of snapshots.

Note [Trust by owner]
zlaunch acts on what lies in these folders: it signals processes that a record names, removes files, loads
pickles and weights. A folder is trusted if it belongs to this user or to root, and nobody else can write to
it. Then this user has put everything into it, links too. The folder's own path may lead through folders of
other users, who can replace it at any time. So the folder is opened once, without following a link, and
checked through the descriptor. `Folder.path` leads through that descriptor to the folder that was checked.
Commands read nothing from other folders: `zlaunch.supervisor.found_runs` refuses them by name.

The launcher imports this module, so it must not import torch.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(PermissionError):
    """Says which folder is not trusted (`filename`), and why (`strerror`)."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))

    def __str__(self) -> str:
        """Return the message without the number that an OSError shows."""
        return f"{self.filename} {self.strerror}"


class Folder:
    """An open folder that only this user and root can write to. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        """Open and check a folder. A link is followed if it is this user's own.

        Raises:
            UntrustedError: It, or a link to it, belongs to another user, or others can write to it.
            OSError: It does not exist, or cannot be opened.
        """
        self._name = path
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            if not _is_own(about):
                raise UntrustedError(path, f"is a link that belongs to {_name(about.st_uid)}")
            path = path.resolve(strict=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        problem = _problem(self._fd)
        if problem:
            self.close()
            raise UntrustedError(path, problem)

    @property
    def path(self) -> Path:
        """Return a path to this very folder, whatever its name leads to by now."""
        return Path(f"/proc/self/fd/{self._fd}")

    def open(self, name: str) -> BinaryIO:
        """Open a file to read it. Raises what `open_file` raises."""
        return open_file(self.path / name)

    def write(self, name: str, data: bytes, mode: int = 0o666) -> None:
        """Write a whole file. A reader sees the old content or the new one. Raises OSError."""
        temporary = self.path / f".{name}.{os.getpid()}-{threading.get_ident()}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(data)
            temporary.replace(self.path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and isinstance(error.filename, str):  # show the name that people know
            error.filename = error.filename.replace(str(self.path), str(self._name), 1)
        self.close()


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read it.

    Raises OSError, also for a pipe, which may never have a writer, and for a device, which may never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return os.fdopen(fd, "rb")


def check_folder(path: Path) -> None:
    """Raise what `Folder` raises."""
    Folder(path).close()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, or check one that exists. A new one is for this user alone.

    Raises UntrustedError or OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_folder(path)


def _problem(fd: int) -> str:
    """Return why an open folder is not trusted, empty if it is."""
    about = os.fstat(fd)
    writers = about.st_mode & _OTHERS_WRITE
    if writers == stat.S_IWGRP and _is_private_group(about.st_gid):
        writers = 0
    is_own = _is_own(about)
    if is_own and not writers:
        return ""
    # What a new entry looks like tells what the file system makes of this user (NFS turns root into nobody),
    # and whether it has modes at all (Windows' disks show 0777 for everything).
    entry = _new_entry(fd)
    if not is_own and (entry is None or entry.st_uid != about.st_uid):
        return f"belongs to {_name(about.st_uid)}"
    if writers and (entry is None or not entry.st_mode & _OTHERS_WRITE):
        mode = stat.S_IMODE(about.st_mode)
        return f"can be written to by other users (mode {mode:04o}): run `chmod go-w` on it"
    return ""


def _is_own(about: os.stat_result) -> bool:
    return about.st_uid in (os.geteuid(), 0)


def _new_entry(fd: int) -> os.stat_result | None:
    """Make an empty file for this user alone in an open folder, and return its status.

    Stat the descriptor, not the name: the folder's owner can replace the file at any moment.
    """
    name = f".trust-{os.getpid()}-{threading.get_ident()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        entry = os.open(name, flags, 0o600, dir_fd=fd)
    except OSError:
        return None
    try:
        return os.fstat(entry)
    finally:
        os.close(entry)
        with suppress(OSError):
            os.unlink(name, dir_fd=fd)


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _is_private_group(gid: int) -> bool:
    """Whether a group is this user's alone: many systems give each user one, of the same name."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
