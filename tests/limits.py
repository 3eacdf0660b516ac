"""Name the only limits on waiting. They end what hangs, and are far above what a busy machine needs.

On a machine that is busier still, ZLAUNCH_TEST_SLOWER=3 triples all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

SLOWER = float(os.environ.get("ZLAUNCH_TEST_SLOWER", "1"))
RANKS_LIMIT_S = 120.0 * SLOWER
"""For the ranks of one test."""
LIMIT_S = 300.0 * SLOWER
"""For one event, one command or one run."""
MATRIX_LIMIT_S = 1200.0 * SLOWER
"""For processes that go through a whole matrix of settings."""
TEST_LIMIT_S = 600.0 * SLOWER
"""For a whole test: above the limits of what it waits for, whose errors say more."""
EXHAUSTIVE_LIMIT_S = 1800.0 * SLOWER
"""For a test that is marked as exhaustive."""
FOR_EVER_S = 3600
"""For what a test must not need: a grace period, a heartbeat, a script that has to be stopped."""


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str]) -> Any:
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + LIMIT_S
    while (begin := time.monotonic()) < deadline:
        if result := condition():
            return result
        # a condition that runs a command leaves most of the time to what it waits for
        time.sleep(max(0.02, 3 * (time.monotonic() - begin)))
    raise AssertionError(f"not within {LIMIT_S:g} s: {what if isinstance(what, str) else what()}")
