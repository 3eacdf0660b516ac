"""Give tests a PATH on which their stubs of programs are not followed by this machine's."""

from __future__ import annotations

import shutil
from pathlib import Path


def plain_tools(folder: Path) -> Path:
    """Make a folder with the programs that stubs in shell need, and no SLURM of this machine; return it."""
    folder.mkdir()
    for name in ("bash", "cat", "env", "sed", "sh", "sleep", "wc"):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder
