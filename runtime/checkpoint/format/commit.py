"""Puts checkpoints into their folder: written beside it, renamed into it, named by ``latest``, pruned.

Note [Atomic saves]. Whenever a save is killed, or the machine loses power, a reader finds the former
checkpoint or the new one, whole. This order ensures it:

1. Each rank writes its file into a hidden temporary folder and syncs it (``FileWriter.close``).
2. After an exchange, the leader writes and syncs the manifest, which has the checksums of all files.
3. It syncs the temporary folder: the names of the files in it are on the disk.
4. It renames a former checkpoint of this tag to ``.TAG.old``, the temporary folder to ``TAG``, and syncs the
   parent. Between the two renames, ``find`` and ``candidates`` take ``.TAG.old``.
5. It deletes ``.TAG.old``, replaces ``latest``, and prunes older checkpoints.

Readers ignore other hidden folders. The next save deletes those that a dead process has left (``prepare``).
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..export import script
from .manifest import (
    FORMAT,
    LATEST,
    MANIFEST,
    VERSION,
    VERSION_WITH_PARTS,
    WHOLE,
    candidates,
    checksum,
    is_checkpoint,
    latest_tag,
    put_aside,
)
from .tensor_file import NAMES, CheckpointError

_STALE_S = 3600.0
"""Seconds without a write after which a temporary folder counts as left by a dead process."""
_DEAD_S = 5.0
"""Seconds without a write after which it does so if its process is known to have ended on this host."""
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^/]+)-(?P<space>\d+)-(?P<pid>\d+)-\d+\.tmp")
_DELETED = re.compile(r"\..+\.zlaunch-deleted")
# For the threads of one process, also where the file system has no locks.
_turn = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Says where a save goes, and how."""

    folder: Path
    tag: str
    exclude_frozen: bool = False
    save_latest: bool = True
    keep_last: int | None = None
    leader: bool
    """Tells whether this rank writes the manifest: rank 0, or each node's first rank."""
    owner: str
    """Name of this save: rank 0's :func:`new_owner`."""
    host: str | None = None
    """Name of this node, where nodes have separate folders."""

    @property
    def temporary(self) -> Path:
        return self.folder / f".{self.tag}.{self.owner}.tmp"


def absolute(folder: str | os.PathLike[str]) -> Path:
    """Make a folder's path absolute, ``~`` included."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def write_manifest(
    folder: Path, entries: Mapping[str, Any], whole: Mapping[str, Tensor], files: Mapping[str, Any]
) -> None:
    """Write the manifest with its checksum: ``entries``, the buffers among the tensors of the file WHOLE, and
    the files. Raises OSError.
    """
    buffers = {
        name.removeprefix("buffer."): {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        for name, tensor in whole.items()
        if name.startswith("buffer.")
    }
    has_parts = any("parts" in entry for entry in entries["parameters"].values())
    version = VERSION_WITH_PARTS if has_parts else VERSION
    # The `entries` of a save have the time of its state, which wins. Those of an import have none.
    head = {"crc32": 0, "format": FORMAT, "version": version, "time": time.time()}
    manifest = json.loads(json.dumps({**head, **entries, "buffers": buffers, "files": files}))
    manifest["crc32"] = checksum(manifest)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(temporary: Path, final: Path) -> None:
    """Make a written folder the checkpoint. At every moment the former one of this tag or the new one can be
    found, both whole. Saves into one folder take turns. Raises OSError.
    """
    # Before the rename: after a power loss, the folder must not have its final name without its entries.
    sync_folder(temporary)
    old = put_aside(final.parent, final.name)
    # Two saves of one tag (several engines, or processes) would otherwise rename between each other's two
    # renames.
    with _alone_in(final.parent):
        if final.exists():
            _remove_aside(old, final)  # of a save that was killed
            os.rename(final, old)
        os.rename(temporary, final)
        sync_folder(final.parent)
        # Only now: until the parent is synced, the disk may know the old checkpoint alone.
        _remove_aside(old, final)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock against this process's other threads and, where the file system has such locks,
    against other processes. Raises OSError.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        with _turn:
            with suppress(OSError):  # NFS has none for folders
                fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with suppress(OSError):  # explicitly: a process forked meanwhile has the descriptor, too
                    fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _remove_aside(old: Path, final: Path) -> None:
    """Remove what was put aside; files that others have put beside that checkpoint go to the present one."""
    if old.is_dir():
        for entry in list(old.iterdir()):
            if not _is_ours(entry) and not (final / entry.name).exists():
                os.rename(entry, final / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def check_tag(tag: str) -> None:
    """Raise CheckpointError for a tag that cannot be a checkpoint's name."""
    # A leading dot marks hidden folders, which candidates() does not list; "latest" is the pointer's file,
    # and "auto" means the newest whole checkpoint.
    plain = tag and tag == tag.strip() and not any(part in tag for part in ("/", "\0"))
    if not plain or tag.startswith(".") or tag in (LATEST, "auto"):
        raise CheckpointError(
            f"tag {tag!r}: must be a plain folder name without / or outer spaces, and not latest or auto"
        )


def prepare(target: SaveTarget) -> None:
    """Make the temporary folder. Raises OSError, CheckpointError if something else has the tag's name."""
    if not target.folder.is_dir():
        target.folder.mkdir(parents=True, exist_ok=True)
        # A new folder's name is in its parent, which no later step syncs.
        sync_folder(target.folder.parent)
    final = target.folder / target.tag
    if final.exists() and not is_checkpoint(final) and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final}: exists and is not a checkpoint: use another tag, or remove it")
    for left in [entry for entry in target.folder.iterdir() if entry.is_dir()]:
        if (_TEMPORARY.fullmatch(left.name) or _DELETED.fullmatch(left.name)) and left != target.temporary:
            with suppress(FileNotFoundError):  # another process cleans, too
                _remove_left(left)
    target.temporary.mkdir()


def _remove_left(left: Path) -> None:
    """Remove what a process that is gone has left, unless there are other files."""
    # Files of somebody else are never deleted, wherever they lie.
    if any(not _is_ours(entry) for entry in left.iterdir()):
        return
    # A name has rank 0's process. When that has ended, other ranks may still write for a moment: hence
    # _DEAD_S. The end of a process on another host, or in another container, cannot be seen: hence _STALE_S.
    if _DELETED.fullmatch(left.name) or _idle_s(left) > (_DEAD_S if _is_gone(left.name) else _STALE_S):
        shutil.rmtree(left, ignore_errors=True)


def _is_ours(entry: Path) -> bool:
    return (
        entry.name in (MANIFEST, WHOLE) or re.fullmatch(r"rank_\d{5,}\.safetensors", entry.name) is not None
    )


_numbers = itertools.count()


def new_owner() -> str:
    """Make a name for one save of this process: host, its space of process ids, process, a number."""
    try:
        # Two containers may share host name and folder, and have different processes of the same id.
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname()}-{space}-{os.getpid()}-{next(_numbers)}"


def _is_gone(name: str) -> bool:
    """Tell whether a temporary folder's process was one of this host and has ended."""
    found = _TEMPORARY.fullmatch(name)
    here = _TEMPORARY.fullmatch(f".x.{new_owner()}.tmp")
    if not found or not here or found["host"] != here["host"] or found["space"] != here["space"]:
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _idle_s(folder: Path) -> float:
    moments = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())]
    return time.time() - max(moments)


def point_to(target: SaveTarget) -> None:
    """Name the checkpoint in ``latest``, and put the script beside it."""
    # See Note [Atomic saves]: `latest` names only what is on the disk under its final name.
    replace_file(target.folder / LATEST, target.tag.encode())
    path = target.folder / script.NAME
    content = script.text().encode()
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)
        mode = path.stat().st_mode
        os.chmod(path, mode | (mode & 0o444) >> 2)  # users who may read it may run it
    sync_folder(target.folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that it has the old content or the new. Raises OSError."""
    # under a separate name: several engines may save into one folder at one time
    temporary = path.with_name(f".{path.name}.{new_owner()}.new")
    for left in path.parent.glob(f".{path.name}.*.new"):
        if _is_gone(f"{left.name.removesuffix('.new')}.tmp"):
            left.unlink(missing_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Synced before the rename: otherwise a power loss may leave the new name with no content.
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def prune(target: SaveTarget) -> None:
    """Keep only the newest of the tags that are numbered like this one, and what ``latest`` names. Other
    files in the folder of a removed checkpoint stay.
    """
    assert target.keep_last is not None
    latest = latest_tag(target.folder)
    # A tag without a number, such as "best", is not one of a series.
    if not re.search(r"\d", target.tag):
        return
    alike = re.compile(re.sub(r"\d+", r"\\d+", re.escape(target.tag)))
    kept = 0
    for path in candidates(target.folder):
        if not alike.fullmatch(path.name):
            continue
        # A save in the background may end after later ones. It must not remove itself.
        if path.name in (target.tag, latest) or kept < target.keep_last:
            kept += 1
            continue
        if all(_is_ours(entry) for entry in path.iterdir()):
            # The deletion of many files can be interrupted. A hidden name first, so that no reader finds the
            # rest; prepare() of a later save deletes it.
            gone = path.with_name(f".{path.name}.zlaunch-deleted")
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
        else:
            # Delete the manifest first. If this is interrupted, the rest is not taken for a checkpoint.
            (path / MANIFEST).unlink(missing_ok=True)
            for entry in [entry for entry in path.iterdir() if _is_ours(entry)]:
                entry.unlink()


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
