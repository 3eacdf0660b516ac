"""Find this user's name and home folder, also where neither HOME nor /etc/passwd knows them.

Containers often run with a user id that has no entry in /etc/passwd.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zlaunch.errors import LaunchError


def home() -> Path | None:
    """Return this user's home folder; None where there is none."""
    path = os.path.expanduser("~")
    return Path(path) if os.path.isabs(path) else None


def user_name() -> str:
    """Return this user's name; the number of a user who has none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return str(os.getuid())


def state_folder() -> Path:
    """Return the folder for what programs keep for this user: ~/.local/state or, without a home, a private
    one among the temporary files. Raises LaunchError where that is somebody else's.
    """
    if (found := home()) is not None:
        return found / ".local" / "state"
    import tempfile  # takes 10 ms, which few launches need

    path = Path(tempfile.gettempdir(), f"zlaunch-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise LaunchError(
            f"{path}: expected a folder that only you can use: set XDG_STATE_HOME=DIR to another one"
        )
    return path
