"""Carry what torch's `@record` says of an error to the run's folder, which may be on another machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zlaunch.runtime.trust import make_folder

_NAME = "TORCHELASTIC_ERROR_FILE"
_LIMIT_CHARS = 1 << 20


def offer() -> str | None:
    """Name a file for `@record` in this node's memory and return its path; None where there is one already,
    or none can be made.
    """
    folder = os.environ.get("ZLAUNCH_MEMORY_DIR")
    if not folder or _NAME in os.environ:
        return None
    path = os.path.join(folder, f"error_{os.environ.get('RANK', '0')}.json")
    try:
        make_folder(Path(folder))
        if os.path.exists(path):  # an earlier attempt's
            os.unlink(path)
    except OSError:
        return None
    os.environ[_NAME] = path
    return path


def hand_over(path: str | None, event_fd: int) -> None:
    """Send what is in the file to the launcher, if there is something."""
    try:
        if path is None or event_fd < 0 or not os.path.exists(path):
            return
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LIMIT_CHARS + 1)
        if len(text) > _LIMIT_CHARS:
            text = json.dumps({"message": f"the first part of a long one: {text[: _LIMIT_CHARS // 8]}"})
        event = {"type": "error_file", "text": text}
        os.write(event_fd, json.dumps(event).encode() + b"\n")
    except OSError:  # the agent is gone, so there is no one to tell
        pass
