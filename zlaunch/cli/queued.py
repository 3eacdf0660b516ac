"""Run one attempt at a queued run: `python -m zlaunch.cli.queued`, which the queue's daemon starts.

Its arguments: the queue's folder, the job's number, the attempt's, the run's id, the descriptor of the
attempt's lock, and a command line of zlaunch. What becomes of it is noted there: it depends on no daemon.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zlaunch.cli.main import main as zlaunch
from zlaunch.errors import LaunchError
from zlaunch.queue.attempt import Attempt
from zlaunch.queue.wake import ensure_daemon


def main() -> int:
    """Launch, note the exit code, and have the daemon see it, which may have to be started anew."""
    folder, job, number, run_id, lock, *arguments = sys.argv[1:]
    os.set_inheritable(int(lock), False)
    attempt = Attempt(Path(folder), int(job), int(number))
    try:
        attempt.begin()
    except OSError as error:
        print(f"zlaunch: error: the queue's folder {folder}: {error.strerror}", file=sys.stderr)
        return 1
    sys.argv[1:] = arguments  # as it is recorded
    code = zlaunch(["--run_id", run_id, "--first_attempt", number, *arguments])
    try:
        attempt.end(code)
    except OSError as error:  # the daemon that has started this process sees its exit code
        print(f"zlaunch: warning: the queue's folder {folder}: {error.strerror}", file=sys.stderr)
    os.close(int(lock))
    try:
        ensure_daemon(Path(folder))
    except LaunchError as error:
        print(f"zlaunch: warning: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
