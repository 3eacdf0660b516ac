"""Read the hosts of a job from the variables of PBS, LSF and Grid Engine, or from Flux. Their launcher is
ssh's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.grammar import is_host
from zlaunch.hostfiles.hostlist import HostListError, expand, short
from zlaunch.plan.options import own_names

_INSIDE = ("ZLAUNCH_RUN_ID", "LOCAL_RANK")
"""A worker has them: the rest is about its own run."""
_FLUX_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Holds a job of a batch system."""

    name: str
    """Names its system and number, for the user."""
    hosts: tuple[str, ...]

    @property
    def is_here(self) -> bool:
        """Tell whether it has this machine alone."""
        own = {name.partition(".")[0] for name in own_names()}
        return len(self.hosts) == 1 and self.hosts[0].partition(".")[0] in own


def read_job(environ: Mapping[str, str]) -> BatchJob | None:
    """Return the job that this process is in; None outside of any. Raises LaunchError."""
    if any(name in environ for name in _INSIDE):
        return None
    if path := environ.get("PBS_NODEFILE"):  # a line for each slot
        return _job("PBS", environ.get("PBS_JOBID"), _first_words(path, "PBS_NODEFILE"))
    if path := environ.get("PE_HOSTFILE"):  # host, slots, queue, processors
        return _job("Grid Engine", environ.get("JOB_ID"), _first_words(path, "PE_HOSTFILE"))
    if text := environ.get("LSB_MCPU_HOSTS"):  # host, slots, host, slots
        return _job("LSF", environ.get("LSB_JOBID"), text.split()[::2])
    if "FLUX_URI" in environ and shutil.which("flux"):  # inside of an instance, as of `flux batch`
        return _job("Flux", environ.get("FLUX_JOB_ID"), _flux_hosts())
    return None


def _flux_hosts() -> list[str]:
    """Ask Flux for the hosts of this job, or of the instance. Raises LaunchError."""
    command = ["flux", "hostlist", "local"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FLUX_TIMEOUT_S
        )
        if done.returncode == 0:
            return list(expand(done.stdout.strip()))
        why = done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"no answer for {_FLUX_TIMEOUT_S:.0f} s"
    except (OSError, HostListError) as error:
        why = str(error)
    raise LaunchError(f"`{' '.join(command)}`: {why}; use --hostfile, or --launcher local") from None


def _job(system: str, number: str | None, hosts: Iterable[str]) -> BatchJob | None:
    found = tuple(dict.fromkeys(hosts))
    if bad := [host for host in found if not is_host(host)]:
        raise LaunchError(
            f"{system} lists {short(bad[0])} as a host of this job, which is not a valid host name: "
            "use --hostfile, or --launcher local"
        )
    return BatchJob(f"{system} job{f' {number}' if number else ''}", found) if found else None


def _first_words(path: str, variable: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.split()[0] for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise LaunchError(
            f"{variable} is {path}, which cannot be read: {why}; use --hostfile, or --launcher local"
        ) from None
