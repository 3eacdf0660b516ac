"""Name the programs and rights of a machine that tests need, and what to install where they are missing.

    python -m tests.programs               # print everything that is missing; exit with 1 if something is
    python -m tests.programs --apt         # leave out what apt-get can install
    python -m tests.programs --packages    # print the missing Debian packages, one a line

A test that needs something of the table carries ``@pytest.mark.needs("g++")``; see `tests/needs.py`.
This module runs with Python 3.10 and its standard library alone: CI asks it what to install first.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from tests.support import COMBINATIONS, SupportError, interpreter


def find(*names: str) -> str | None:
    """Return the path of the first of these programs that is there, in the folders of daemons too."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _compiles_halves() -> bool:
    """Return whether g++ has _Float16, which our kernels are compiled with."""
    compiler = find("g++")
    if compiler is None:
        return False
    command = [compiler, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=b"_Float16 half;", capture_output=True).returncode == 0


def _makes_environments() -> bool:
    return all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))


def _allows_namespaces() -> bool:
    unshare = find("unshare")
    if unshare is None:
        return False
    command = [unshare, "--net", "--pid", "--uts", "--mount", "--ipc", "--fork", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _allows_mounts() -> bool:
    mount, umount = find("mount"), find("umount")
    if mount is None or umount is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run([mount, "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
            return False
        return subprocess.run([umount, folder], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Need:
    """Something of the machine that tests need."""

    name: str
    remedy: str
    """What to do where it is missing."""
    package: str = ""
    check: Callable[[], bool] | None = None
    """Return whether it is there. Without one, a program of this name is looked for."""
    uses: str = ""
    """The program that `check` runs: without it, nothing is known."""

    def is_there(self) -> bool:
        """Return whether the machine has it."""
        return self.check() if self.check else find(self.name) is not None

    def __str__(self) -> str:
        return f"{self.name} ({self.remedy})"


def _program(name: str, package: str, check: Callable[[], bool] | None = None) -> Need:
    return Need(name, f"apt-get install {package}", package, check)


NEEDS = {
    need.name: need
    for need in (
        Need("root", "run as root", check=lambda: os.geteuid() == 0),
        Need(
            "namespaces",
            "run where root may make namespaces: docker run --privileged",
            check=_allows_namespaces,
            uses="unshare",
        ),
        Need(
            "mounts", "run where root may mount: docker run --privileged", check=_allows_mounts, uses="mount"
        ),
        Need(
            "process ids",
            "run where root may write /proc/sys/kernel/ns_last_pid: docker run --privileged",
            check=lambda: os.access("/proc/sys/kernel/ns_last_pid", os.W_OK),
        ),
        _program("g++", "g++", _compiles_halves),
        _program("chromium", "chromium", lambda: chromium() is not None),
        _program("mpirun.openmpi", "openmpi-bin"),
        _program("mpiexec.hydra", "mpich"),
        _program("ssh", "openssh-client"),
        _program("ssh-keygen", "openssh-client"),
        _program("ssh-keyscan", "openssh-client"),
        _program("sshd", "openssh-server"),
        _program("slurmctld", "slurm-wlm"),
        _program("slurmd", "slurm-wlm"),
        _program("srun", "slurm-client"),
        _program("scontrol", "slurm-client"),
        _program("munged", "munge"),
        _program("ip", "iproute2"),
        _program("ethtool", "ethtool"),
        _program("nsenter", "util-linux"),
        _program("unshare", "util-linux"),
        _program("setpriv", "util-linux"),
        _program("mount", "mount"),
        _program("ps", "procps"),
        _program("make", "make"),
        _program("venv", "python3-venv", _makes_environments),
    )
}

SPACE = 19 * 10**9
"""Bytes of disk that a whole run of CI takes: the project's installation, and two of torch with CUDA's
libraries, the second while pip unpacks it."""

CLUSTER = (
    *("root", "namespaces", "ip", "ethtool", "nsenter", "unshare", "mount", "ps"),
    *("ssh", "ssh-keygen", "ssh-keyscan", "sshd", "slurmctld", "slurmd", "srun", "scontrol", "munged"),
)
"""What the cluster of tests/cluster/testbed.py needs."""

FIXTURES = {"cluster": CLUSTER, "library": ("g++",), "small_disk": ("root", "mounts")}
"""Fixture -> what every test that uses it needs, without carrying the mark."""


def chromium() -> str | None:
    """Return the path of Chromium, or of a browser that is built from it."""
    return find("chromium", "chromium-browser", "google-chrome")


@functools.cache
def is_there(name: str) -> bool:
    """Return whether the machine has what the table calls by this name; look once."""
    return NEEDS[name].is_there()


def missing(names: tuple[str, ...]) -> str:
    """Return which of these are missing and what to do about each; empty where all are there."""
    wanted = [
        NEEDS[name].uses if NEEDS[name].uses and not is_there(NEEDS[name].uses) else name for name in names
    ]
    return ", ".join(str(NEEDS[name]) for name in dict.fromkeys(wanted) if not is_there(name))


def missing_space(needed: int = SPACE) -> list[str]:
    """Return a line if the disk of this folder or of temporary files is too full to install everything."""
    lines = []
    for folder in (os.getcwd(), tempfile.gettempdir()):
        free = shutil.disk_usage(folder).free
        if free < needed:
            lines.append(f"{needed / 1e9:.0f} GB on the disk of {folder} ({free / 1e9:.0f} GB are free)")
    return lines[:1]


def _missing_pythons() -> list[str]:
    """Return a line for each Python that `make test-support` does not find."""
    lines = []
    for combination in COMBINATIONS:
        try:
            interpreter(combination.python)
        except SupportError as error:
            lines.append(str(error))
    return lines


def main() -> int:
    """Print what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs", description="List what the tests need and this machine lacks."
    )
    parser.add_argument(
        "--packages", action="store_true", help="print the missing Debian packages, one a line"
    )
    parser.add_argument("--apt", action="store_true", help="list only what apt-get cannot install")
    args = parser.parse_args()
    absent = [need for name, need in NEEDS.items() if not is_there(name)]
    needs = [need for need in absent if not need.uses or is_there(need.uses)]
    if args.packages:
        for package in sorted({need.package for need in needs if need.package}):
            print(package)
        return 0
    if args.apt:
        needs = [need for need in needs if not need.package]
    lines = [*map(str, needs), *_missing_pythons(), *missing_space()]
    if lines:
        print("The tests that need these would be skipped or fail:", *lines, sep="\n  ")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
