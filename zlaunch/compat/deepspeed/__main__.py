"""``python -m zlaunch.compat.deepspeed COMMAND ...``: run a command in which ``import deepspeed`` is zlaunch.

For what zlaunch does not start itself: ``python -m zlaunch.compat.deepspeed accelerate launch train.py``.
There, the command ``deepspeed`` is ``zlaunch`` too. Without a command it prints lines for a shell that do so.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from zlaunch.compat.deepspeed import install

_PROGRAMS = Path(__file__).parent / "bin"


def main() -> None:
    """Replace this process by the command."""
    install()
    os.environ["PATH"] = f"{_PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ["ZLAUNCH_COMPAT"] = "deepspeed"
    if len(sys.argv) == 1:
        print(f'export PATH={shlex.quote(str(_PROGRAMS))}:"$PATH"')
        for name in ("PYTHONPATH", "ZLAUNCH_COMPAT"):
            print(f"export {name}={shlex.quote(os.environ[name])}")
        return
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"zlaunch: cannot run {sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
