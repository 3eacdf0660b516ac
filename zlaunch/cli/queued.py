"""Run one attempt at a queued run: `python -m zlaunch.cli.queued`, which the queue's daemon starts.

Its arguments: the run's folder, its id, the attempt's number, the descriptor of its lock, and a command line
of zlaunch. What becomes of it is noted in the run's folder, so that it depends on no daemon.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zlaunch.cli.main import main as zlaunch
from zlaunch.errors import LaunchError
from zlaunch.queue.attempt import Attempt
from zlaunch.queue.wake import ensure_daemon, queue_folder


def main() -> int:
    """Launch, note the exit code, and have the daemon see it, which may have to be started anew."""
    run_dir, run_id, number, lock, *arguments = sys.argv[1:]
    os.set_inheritable(int(lock), False)
    attempt = Attempt(Path(run_dir), int(number))
    attempt.begin()
    sys.argv[1:] = arguments  # as it is recorded
    code = zlaunch(["--run_id", run_id, "--first_attempt", number, *arguments])
    attempt.end(code)
    os.close(int(lock))
    try:
        ensure_daemon(queue_folder())
    except LaunchError as error:
        print(f"zlaunch: warning: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
