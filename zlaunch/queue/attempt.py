"""Keep the files of one attempt at a queued run: a lock that its launcher holds, its beginning, its end.

They say what has become of it, whoever asks: a daemon that was killed leaves nothing in doubt.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zlaunch.system.processes import Process, start_ticks

_FOLDER = "attempts"
Standing = Literal["not begun", "alive", "ended", "killed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names an attempt. Its files lie in the queue's folder: a user may remove a run's at any time."""

    queue: Path
    job_id: int
    number: int

    def lock(self) -> int | None:
        """Hold the attempt while the returned descriptor, or a copy, is open; None where another does.

        Raises OSError.
        """
        path = self._file("lock")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def begin(self) -> None:
        """Note that this process is the attempt's launcher."""
        self._write("begun", {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())})

    def end(self, exit_code: int) -> None:
        """Note how it ended."""
        self._write("ended", {"exit_code": exit_code})

    def standing(self) -> tuple[Standing, int | None]:
        """Return what has become of it, and its exit code where it has ended. Raises OSError."""
        fd = self.lock()
        if fd is None:
            return "alive", None
        os.close(fd)
        code = self._read("ended").get("exit_code")
        if code is not None:
            return "ended", code
        return ("killed" if self._file("begun").exists() else "not begun"), None

    def process(self) -> Process | None:
        """Return its launcher; None before it has begun."""
        known = self._read("begun")
        return Process(known["pid"], known["start_ticks"]) if known else None

    def _file(self, kind: str) -> Path:
        return self.queue / _FOLDER / f"{self.job_id}.{self.number}.{kind}"

    def _write(self, kind: str, content: dict[str, int | None]) -> None:
        path = self._file(kind)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    def _read(self, kind: str) -> dict[str, int]:
        try:
            content = json.loads(self._file(kind).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def forget(queue: Path, job_id: int) -> None:
    """Remove the files of a job's attempts."""
    for path in (queue / _FOLDER).glob(f"{job_id}.*"):
        path.unlink(missing_ok=True)
