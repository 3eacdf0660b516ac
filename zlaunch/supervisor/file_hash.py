"""Hash the files that a run is made of: its script, and files that git does not track."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zlaunch.runtime.trust import open_file

MOST_FILE_BYTES = 1_000_000
"""The longest file without git that is hashed; longer ones are data rather than code."""
MOST_BYTES = 10_000_000
"""The most bytes of such files together."""
_BLOCK_BYTES = 1 << 20


def file_hash(path: Path, most: int | None = None) -> str:
    """Return the SHA-256 of a file.

    Raises OSError, also for what is no regular file, and for a file of more than `most` bytes.
    """
    found = hashlib.sha256()
    with open_file(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the hashes of the files of a folder that are short enough, until they are too many bytes."""
    found: dict[str, str] = {}
    left = MOST_BYTES
    for name in names:
        with suppress(OSError):
            path = folder / name
            size = path.stat().st_size
            found[name] = file_hash(path, min(left, MOST_FILE_BYTES))
            left -= size
    return found
