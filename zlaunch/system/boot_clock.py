"""Read the clock that no user sets and that does not stop while the machine is suspended."""

from __future__ import annotations

import time
from functools import lru_cache


def now_s() -> float:
    """Return the seconds since this machine was booted, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@lru_cache
def boot_id() -> str:
    """Return the id of this boot of the machine; "" where /proc does not say it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
