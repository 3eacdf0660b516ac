"""Test the pipes to an agent on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from zlaunch.transports.local import LocalTransport

SAYS = """
import time
print('{"type":"pong"}')
print('{"type":"output"}', flush=True)
time.sleep(600)
"""


def test_nothing_is_read_behind_damaged_data(tmp_path: Path) -> None:
    transport = LocalTransport("n1", [sys.executable, "-c", SAYS], tmp_path / "err")
    kinds = [event["type"] for event in transport.events() if isinstance(event, dict)]
    transport.kill()
    assert kinds == ["pong", "damaged"]
