"""Run one attempt at a queued run: `python -m zlaunch.cli.queued REQUEST COMMAND_LINE...`.

The queue's daemon starts it. Submitted runs name this module, also those of older versions.
"""

from __future__ import annotations

import sys

from zlaunch.cli.main import main
from zlaunch.queue.attempt_process import run_attempt

if __name__ == "__main__":
    sys.exit(run_attempt(sys.argv[1], sys.argv[2:], main))
