"""Name the only limits on waiting. They end what hangs, and are far above what a busy machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 300.0
"""For one event, one command or one run."""
MATRIX_LIMIT_S = 1200.0
"""For processes that go through a whole matrix of settings."""
FOR_EVER_S = 3600
"""For what a test must not need: a grace period, a heartbeat, a script that has to be stopped."""


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str]) -> Any:
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {LIMIT_S:g} s: {what if isinstance(what, str) else what()}")
