"""Ask for larger pipes: the more a pipe holds, the fewer turns its two ends take."""

from __future__ import annotations

import fcntl
from contextlib import suppress

_LARGEST_BYTES = 1 << 20
"""What the kernel allows every user (/proc/sys/fs/pipe-max-size)."""


def widen(fd: int, size: int = _LARGEST_BYTES) -> None:
    """Give a pipe room for `size` bytes, if the kernel allows that."""
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
