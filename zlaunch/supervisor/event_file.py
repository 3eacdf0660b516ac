"""Read the events of a run from its file, also while it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zlaunch.runtime.trust import Folder
from zlaunch.system.events import Event, LineBuffer

_BLOCK_BYTES = 1 << 20


class EventFile:
    """Reads the events of a run's file, and later those that have come."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._lines = path, 0, LineBuffer()

    def read(self) -> Iterator[Event]:
        """Yield the events that have come since the last call; none where there is no file.

        Raises OSError, also where the folder is not trusted: see Note [Trust by owner] in runtime/trust.py.
        """
        try:
            with Folder(self._path.parent) as folder, folder.open(self._path.name) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._lines = 0, LineBuffer()  # another run has begun in the folder
                file.seek(self._offset)
                while chunk := file.read(_BLOCK_BYTES):
                    self._offset += len(chunk)
                    yield from self._lines.feed(chunk)
        except FileNotFoundError:
            return
