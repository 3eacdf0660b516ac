"""Write texts as one archive: whole or not at all, and for this user's eyes only."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from zlaunch.errors import LaunchError


def pack(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return a .tar.gz of files in one folder. It does not say who has made it."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size, about.mode, about.mtime = len(data), 0o600, int(time.time())
            archive.addfile(about, io.BytesIO(data))
    return whole.getvalue()


def check_target(path: Path, *, force: bool) -> None:
    """Prove that a file may be written there. Raises LaunchError, which names -o and --force."""
    if path.is_dir():
        raise LaunchError(f"{path} is a folder: name a file with -o")
    if not os.path.lexists(path):
        return
    if not force:
        raise LaunchError(f"{path} already exists: name another file with -o, or replace it with --force")
    if not path.is_file():
        raise LaunchError(
            f"{path} is not a regular file, so --force does not replace it: name another one with -o"
        )


def write(path: Path, data: bytes) -> None:
    """Write a file that only this user can read. Raises LaunchError, and leaves nothing then."""
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=".zlaunch-bundle-", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some, or write elsewhere with -o FILE" if full else "write elsewhere with -o FILE"
        raise LaunchError(f"cannot write {path}: {error.strerror or error}: {advice}") from None
    finally:
        if temporary is not None:
            os.unlink(temporary)
