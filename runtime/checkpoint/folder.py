"""The folder that checkpoints are in: written beside it, renamed into it, named by ``latest``, pruned."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import standalone
from .standalone import LATEST, MANIFEST, candidates, checksum, put_aside

_STALE_S = 3600.0
"""A temporary folder in which nothing has been written for so long is a dead process's."""
_DEAD_S = 5.0
"""The same where its process is known to be gone from this host."""
SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to, and how."""

    folder: Path
    tag: str
    exclude_frozen: bool = False
    save_latest: bool = True
    keep_last: int | None = None
    leader: bool
    """This rank writes the manifest: rank 0, or each node's first where nodes have folders of their own."""
    owner: str
    """Host and process id of rank 0."""
    host: str | None = None
    """The name of this node, where nodes have folders of their own."""

    @property
    def temporary(self) -> Path:
        return self.folder / f".{self.tag}.{self.owner}.tmp"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The manifest with its checksum, and the script that reads it without zlaunch. Raises OSError."""
    manifest = json.loads(json.dumps({"crc32": 0, **manifest}))
    manifest["crc32"] = checksum(manifest)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(temporary: Path, final: Path) -> None:
    """Make a written folder the checkpoint. At every moment the former one of this tag or the new one can be
    found, both whole. Raises OSError.
    """
    sync_folder(temporary)
    old = put_aside(final.parent, final.name)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def prepare(target: Target) -> None:
    target.folder.mkdir(parents=True, exist_ok=True)
    for left in target.folder.glob(".*.tmp"):
        if left == target.temporary or not left.is_dir():
            continue
        if _idle_s(left) > (_DEAD_S if _is_gone(left.name) else _STALE_S):
            shutil.rmtree(left, ignore_errors=True)
    for left in target.folder.glob(".*.deleted"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(target.temporary, ignore_errors=True)
    target.temporary.mkdir()


def _is_gone(name: str) -> bool:
    """Whether a temporary folder's process was one of this host and has ended."""
    host, _, pid = name.removesuffix(".tmp").rpartition("-")
    if not pid.isdigit() or not host.endswith(f".{socket.gethostname()}"):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _idle_s(folder: Path) -> float:
    moments = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())]
    return time.time() - max(moments)


def point_to(target: Target) -> None:
    """Name the checkpoint in ``latest``, and put the script beside it."""
    replace_file(target.folder / LATEST, target.tag.encode())
    script = target.folder / SCRIPT
    replace_file(script, Path(standalone.__file__).read_bytes())
    os.chmod(script, 0o755)
    sync_folder(target.folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that it has the old content or the new. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def prune(target: Target) -> None:
    """Remove all but the newest; never what has just been saved, nor what ``latest`` names."""
    assert target.keep_last is not None
    try:
        latest = (target.folder / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        latest = ""
    kept = 0
    for path in candidates(target.folder):
        if path.name in (target.tag, latest) or kept < target.keep_last:
            kept += 1
            continue
        gone = path.with_name(f".{path.name}.deleted")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
