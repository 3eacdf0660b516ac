"""Run the listing of packages (`packages.py`) for an agent, which never waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zlaunch.system.processes import python_module_argv, yield_to_others

_MOST_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16


class PackageList:
    """Holds the process that lists the packages. The agent kills it when the workers have ended."""

    def __init__(self, env: Mapping[str, str], cwd: str) -> None:
        """Start it with a worker's variables. Raises OSError."""
        environ = {**os.environ, **env}
        environ.pop("ZLAUNCH_RUN_ID", None)  # it belongs to the agent, and no end of the run waits for it
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                [*python_module_argv("zlaunch.node.packages"), str(os.getpid())],
                env=environ,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            os.close(reader)
            raise OSError(str(error)) from error
        finally:
            os.close(writer)
        yield_to_others(process.pid)
        process.returncode = 0  # the agent waits for all its children itself; Popen must not
        os.set_blocking(reader, False)
        self.fd: int | None = reader
        """None after it is closed."""
        self.pid: int | None = process.pid
        """None after its status has been taken: another process may have the id."""
        self._taken = b""

    def read(self) -> dict[str, Any] | None:
        """Take what the process has printed. Return the interpreter and its packages at the end."""
        assert self.fd is not None
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        self._taken += chunk
        # What runs is the worker's interpreter, which may be any program: what it prints is bounded.
        if chunk and len(self._taken) <= _MOST_BYTES:
            return None
        try:
            about = json.loads(self._taken)
        except ValueError:
            return {"why": "the process that lists them has failed"}
        return about if isinstance(about, dict) else {"why": "another program answers as this Python"}

    def kill(self) -> None:
        """End the process."""
        if self.pid is not None:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
