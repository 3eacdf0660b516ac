"""Record what a process passes on to its children (nice value, CPUs, resource limits), and restore it."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SAME_AS_NOFILE = "RLIMIT_OFILE"
_LIMITS = {
    name: getattr(resource, name)
    for name in sorted(vars(resource))
    if name.startswith("RLIMIT_") and name != _SAME_AS_NOFILE
}


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Holds the settings of one process."""

    nice: int
    affinity: tuple[int, ...]
    """The CPUs that it may use."""
    limits: Mapping[str, tuple[int, int]]
    """Name of a resource limit (RLIMIT_NOFILE) -> its soft and hard value; -1 is unlimited."""

    @classmethod
    def of_this_process(cls) -> ProcessSettings:
        """Read the settings of this process."""
        limits = {name: resource.getrlimit(which) for name, which in _LIMITS.items()}
        return cls(os.getpriority(os.PRIO_PROCESS, 0), tuple(sorted(os.sched_getaffinity(0))), limits)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        limits = {name: list(values) for name, values in self.limits.items()}
        return {"nice": self.nice, "affinity": list(self.affinity), "limits": limits}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ProcessSettings:
        """Read what `as_json` gave. Raises ValueError, TypeError, KeyError for anything else."""
        limits = {str(name): (int(soft), int(hard)) for name, (soft, hard) in content["limits"].items()}
        return cls(int(content["nice"]), tuple(int(cpu) for cpu in content["affinity"]), limits)

    def restore(self) -> list[str]:
        """Give this process these settings; return what could not be restored, by name and value."""
        missed = [text for name in self.limits if (text := self._restore_limit(name))]
        missed += self._restore_cpus()
        now = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            if now != self.nice:
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        except OSError as error:
            missed.append(f"nice value {self.nice} (stays {now}: {error.strerror})")
        return missed

    def _restore_cpus(self) -> list[str]:
        """Return only the CPUs that are gone."""
        if set(self.affinity) == os.sched_getaffinity(0):
            return []
        try:
            os.sched_setaffinity(0, self.affinity)
        except OSError:  # none of them is there
            pass
        now = os.sched_getaffinity(0)
        gone = sorted(set(self.affinity) - now)
        return [f"CPUs {_shown(gone)} (runs on {_shown(sorted(now))})"] if gone else []

    def _restore_limit(self, name: str) -> str:
        soft, hard = self.limits[name]
        if (which := _LIMITS.get(name)) is None:
            return f"{name} {_value(soft)} (this machine has no such limit)"
        known, highest = resource.getrlimit(which)
        if (known, highest) == (soft, hard):
            return ""
        try:
            resource.setrlimit(which, (soft, hard))
            return ""
        except (OSError, ValueError):
            pass  # an ordinary user cannot raise a hard limit: restore as much as there is
        within = [value for value in (soft, highest) if value != resource.RLIM_INFINITY]
        now = min(within, default=resource.RLIM_INFINITY)
        try:
            resource.setrlimit(which, (now, highest))
        except (OSError, ValueError):
            now = known
        if now == soft:
            return f"hard {name} {_value(hard)} (stays {_value(highest)})"
        return f"{name} {_value(soft)} (is {_value(now)})"


def _value(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _shown(cpus: list[int]) -> str:
    """Return numbers as ranges: 0-3,8."""
    spans: list[list[int]] = []
    for cpu in cpus:
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
