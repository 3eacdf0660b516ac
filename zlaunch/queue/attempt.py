"""Keep the files of one attempt at a queued run: a lock that its launcher holds, its beginning, its end.

They say what has become of it, whoever asks, with or without a daemon. `begun` names the boot and the pid
namespace that its process id belongs to.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zlaunch import __version__
from zlaunch.queue.start_request import PROTOCOL
from zlaunch.supervisor.end import End
from zlaunch.system import boot_clock
from zlaunch.system.processes import Process, pid_namespace, start_ticks

_FOLDER = "attempts"
Standing = Literal["not begun", "alive", "ended", "lost", "foreign"]
"""`lost`: nobody holds its lock, and nobody wrote its end. `foreign`: another zlaunch wrote its files."""


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
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def begin(self) -> None:
        """Note that this process is the attempt's launcher. Raises OSError."""
        process = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
        self._write("begun", {**process, "boot": boot_clock.boot_id(), "pid_namespace": pid_namespace()})

    def end(self, end: End) -> None:
        """Note how it ended. Raises OSError."""
        self._write("ended", end.as_json())

    def standing(self) -> tuple[Standing, End | None]:
        """Return what has become of it, and its end where it has ended. Raises OSError."""
        fd = self._lock(fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at the same time
        if fd is None:
            return "alive", None
        os.close(fd)
        if self.foreign_version() is not None:
            return "foreign", None
        if (end := End.from_json(self._read("ended"))) is not None:
            return "ended", end
        return ("lost" if self._file("begun").exists() else "not begun"), None

    def foreign_version(self) -> str | None:
        """Return the zlaunch that wrote its files, if that speaks another protocol than this one. Versions up
        to 0.2.0 wrote no number, and the same files.
        """
        for known in (self._read("begun"), self._read("ended")):
            if known.get("protocol", PROTOCOL) != PROTOCOL:
                return str(known.get("version", "?"))
        return None

    def process(self) -> Process | None:
        """Return its launcher; None before it has begun, and where its process id means nothing here."""
        known = self._read("begun")
        if not known or not self.is_here:
            return None
        return Process(known["pid"], known["start_ticks"])

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been booted since it began."""
        return bool(self._read("begun").get("boot", boot_clock.boot_id()) == boot_clock.boot_id())

    @property
    def is_here(self) -> bool:
        """Whether process ids of its launcher mean the same processes here."""
        namespace = self._read("begun").get("pid_namespace", pid_namespace())
        return self.is_of_this_boot and bool(namespace == pid_namespace())

    def lost_for_s(self) -> float:
        """Return for how long it has been known to be lost, and note that. Raises OSError."""
        known, now = self._read("lost"), boot_clock.now_s()
        if known.get("boot") != boot_clock.boot_id() or not isinstance(known.get("since"), (int, float)):
            known = {"boot": boot_clock.boot_id(), "since": now}
            self._write("lost", known)
        return now - float(known["since"])

    def _lock(self, how: int) -> int | None:
        path = self._file("lock")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, how)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _file(self, kind: str) -> Path:
        return self.queue / _FOLDER / f"{self.job_id}.{self.number}.{kind}"

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        path = self._file(kind)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"protocol": PROTOCOL, "version": __version__, **content}))
        temporary.replace(path)

    def _read(self, kind: str) -> dict[str, Any]:
        try:
            content = json.loads(self._file(kind).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def forget(queue: Path, job_id: int) -> None:
    """Remove the files of a job's attempts."""
    for path in (queue / _FOLDER).glob(f"{job_id}.*"):
        path.unlink(missing_ok=True)
