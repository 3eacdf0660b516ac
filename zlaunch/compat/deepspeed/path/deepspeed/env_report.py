"""Prints what a bug report needs. Nothing is compiled for a machine, so there are no operators to list."""

from __future__ import annotations

import argparse as _argparse
import os as _os

import torch as _torch

from zlaunch import __version__ as _zlaunch_version
from zlaunch.compat.deepspeed import VERSION as _VERSION
from zlaunch.compat.deepspeed.missing import absent as _absent

_COLUMN = 33
_UNITS = ("B", "KB", "MB", "GB", "TB")


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print versions and paths; ``zlaunch doctor`` checks a machine. Neither argument changes anything."""
    debug_report()


def debug_report() -> None:
    """Print versions and paths."""
    report = {
        "torch install path": list(_torch.__path__),
        "torch version": _torch.__version__,
        "torch cuda version": _torch.version.cuda,
        "deepspeed install path": [_os.path.dirname(__file__)],
        "deepspeed info": f"{_VERSION}, zlaunch {_zlaunch_version}",
        "shared memory (/dev/shm) size": get_shm_size(),
    }
    print("DeepSpeed general environment info:")
    for name, value in report.items():
        print(name, "." * (_COLUMN - len(name)), value)


def get_shm_size() -> str:
    """Return the size of /dev/shm, such as ``7.76 GB``."""
    try:
        found = _os.statvfs("/dev/shm")
    except OSError as error:
        return f"unknown: {error.strerror}"
    return human_readable_size(found.f_frsize * found.f_blocks)


def human_readable_size(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} {_UNITS[-1]}"


def cli_main() -> None:
    """Read the command's arguments, and print."""
    parser = _argparse.ArgumentParser()
    parser.add_argument("--hide_operator_status", action="store_true")
    parser.add_argument("--hide_errors_and_warnings", action="store_true")
    options = parser.parse_args()
    main(options.hide_operator_status, options.hide_errors_and_warnings)


__getattr__ = _absent("deepspeed.env_report")

if __name__ == "__main__":
    cli_main()
