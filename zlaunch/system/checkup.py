"""Ask a node about itself for `zlaunch doctor` and `--health`, and find what is wrong with the answers.

`own_checkup` runs on the node, in the agent; `judge` is pure and runs where zlaunch was called.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from zlaunch import __version__
from zlaunch.runtime.host_memory import host_bytes
from zlaunch.system.gpu_health import GpuReport, examine_gpus
from zlaunch.system.machine import Facts
from zlaunch.system.network import interface_addresses, open_listener

_MAX_SKEW_S = 1.0
_MIN_DISK_BYTES = 1 << 30
_MIN_MEMORY_BYTES = 1 << 30
_MIN_SHM_BYTES = 64 << 20
_MIN_NOFILE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Holds what a node tells beyond its `Facts`."""

    torch: str | None
    """Version of torch; None when that Python has none."""
    models: tuple[str, ...]
    """Names of all GPUs that the driver knows, hidden ones included."""
    driver: str | None
    """Version of NVIDIA's kernel module."""
    memory_free_bytes: int
    """Bytes of memory that the system and the control groups leave to workers."""
    gpu_report: GpuReport
    """The GPUs that were asked about."""
    disk_free_bytes: int | None
    """Bytes free in the working folder; None when there is no such folder."""
    shm_free_bytes: int | None
    """Bytes free in /dev/shm; None when there is none."""
    memlock_bytes: int | None
    """Soft limit of locked memory (ulimit -l); None: unlimited."""
    nofile: int | None
    """Soft limit of open files (ulimit -n); None: unlimited."""
    nccl_setting: str | None
    """NCCL_SOCKET_IFNAME as the workers would have it."""
    nccl_interface: str
    """The interface that NCCL would take; empty when none fits."""
    listen_error: str
    """Why no port can be listened on; empty when one can."""

    def as_event(self) -> dict[str, Any]:
        """Return the checkup as an event, for the way to the launcher."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {"type": "checkup", **values, "gpu_report": self.gpu_report.as_dict()}

    @staticmethod
    def from_event(event: Mapping[str, Any]) -> Checkup:
        """Read what `as_event` has written. Raises KeyError when something is missing."""
        values = {name: event[name] for name in Checkup.__slots__}
        gpus = GpuReport.from_dict(values["gpu_report"])
        return Checkup(**{**values, "models": tuple(values["models"]), "gpu_report": gpus})


# -- on the node -------------------------------------------------------------------------------


def own_checkup(workdir: str, nccl_setting: str | None, gpus: Sequence[str] = ()) -> Checkup:
    """Check this machine, as this process may use it.

    Args:
        workdir: the folder that workers would run in.
        nccl_setting: NCCL_SOCKET_IFNAME; None: our own.
        gpus: tokens of CUDA_VISIBLE_DEVICES whose health is examined.
    """
    setting = nccl_setting or os.environ.get("NCCL_SOCKET_IFNAME") or None
    return Checkup(
        torch=_torch_version(),
        models=gpu_models(),
        driver=driver_version(),
        memory_free_bytes=host_bytes(),
        gpu_report=examine_gpus(gpus),
        disk_free_bytes=_free_bytes(workdir),
        shm_free_bytes=_free_bytes("/dev/shm"),
        memlock_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        nofile=_soft_limit(resource.RLIMIT_NOFILE),
        nccl_setting=setting,
        nccl_interface=nccl_interface(("lo", *interface_addresses()), setting),
        listen_error=_listen_error(),
    )


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def gpu_models(folder: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Return the names of the GPUs, such as `NVIDIA H100 80GB HBM3`, in the order of their bus addresses."""
    found = []
    for path in sorted(folder.glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        found.append(match[1] if match else "unknown")
    return tuple(found)


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; None where it is not loaded."""
    try:
        match = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else "unknown"


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _soft_limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def nccl_interface(names: Sequence[str], setting: str | None) -> str:
    """Return the interface that NCCL takes first, of these in the system's order; empty when none fits.

    The setting is a comma-separated list of prefixes; `=` before it asks for whole names, `^` for all others.
    """
    if setting:
        others = setting.startswith("^")
        words = setting.removeprefix("^")
        exact = words.startswith("=")
        wanted = [word for word in words.removeprefix("=").split(",") if word]
        fitting = [
            name
            for name in names
            if any(name == word if exact else name.startswith(word) for word in wanted) != others
        ]
        return fitting[0] if fitting else ""
    last = ("docker", "lo", "virbr")
    first = [name for name in names if name.startswith("ib")]
    first += [name for name in names if not name.startswith(last)]
    first += [name for prefix in last for name in names if name.startswith(prefix)]
    return first[0] if first else ""


def _listen_error() -> str:
    try:
        open_listener(0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- the judgement -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Holds all that was found out about one host."""

    host: str
    error: str = ""
    """Why the host did not answer, and what to do."""
    facts: Facts | None = None
    checkup: Checkup | None = None
    slots: int | None = None
    """Slots in the hostfile, if it has any."""
    workdir: str = ""
    """The folder that workers would run in."""
    iface: str | None = None
    """The interface that was asked for."""
    skew_s: float | None = None
    """The host's clock less ours."""
    meets_by: str | None = None
    """The interface by which the host and node 0 reach each other; None when that was not found out."""
    meet_error: str = ""
    """Why the host and node 0 cannot reach each other, and what to do."""


Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Names one thing that is wrong with a host. An error: a launch would fail."""

    host: str
    level: Level
    check: str
    """What was looked at; a column of the table."""
    text: str
    advice: str = ""
    """What to do; empty where the text says it."""
    unhealthy: bool = False
    """Tells whether `--health` refuses the host for it."""


def judge(reports: Sequence[HostReport]) -> list[Problem]:
    """Return what is wrong, host by host in their order, errors first."""
    found = [problem for report in reports for problem in _alone(report, several=len(reports) > 1)]
    found += _differing(reports)
    order = {report.host: index for index, report in enumerate(reports)}
    return sorted(found, key=lambda problem: (order[problem.host], problem.level))


def _alone(report: HostReport, *, several: bool) -> Iterator[Problem]:
    """Yield the problems that one report shows."""
    facts = report.facts
    error = partial(Problem, report.host, "error")
    if report.error:
        yield error("host", report.error)
    if facts is None:
        return
    if facts.version != __version__:
        text = f"zlaunch {facts.version} there, {__version__} here"
        yield error("zlaunch", text, "install the same version")
    gpus = len(facts.devices)
    if gpus and report.slots is not None and report.slots > gpus:
        text = f"slots={report.slots} in the hostfile, but it has {facts.describe_devices()}"
        yield error("GPUs", text, f"write slots={gpus}")
    if report.iface is not None and report.iface not in facts.addresses:
        text = f"--iface {report.iface}: no such interface is up; it has {', '.join(facts.addresses)}"
        yield error("NCCL", text, "name one that every host has")
    if report.meet_error:
        yield error("node 0", report.meet_error)
    if report.skew_s is not None and abs(report.skew_s) > _MAX_SKEW_S:
        text = f"its clock is {abs(report.skew_s):.1f} s {'ahead' if report.skew_s > 0 else 'behind'}"
        yield Problem(report.host, "warning", "clock", text, "let chrony or systemd-timesyncd set it")
    if report.checkup is not None:
        yield from _resources(report, report.checkup, gpus, several=several)


def _resources(report: HostReport, checkup: Checkup, gpus: int, *, several: bool) -> Iterator[Problem]:
    """Yield the problems that the checkup shows."""
    problem = partial(Problem, report.host)
    if checkup.torch is None:
        advice = "install it, or name another Python with --remote_python or --venv"
        yield problem("error", "torch", "its Python has no torch", advice)
    if checkup.listen_error:
        advice = "see its limits, its network settings, its container"
        yield problem("error", "node 0", f"it cannot listen on a port: {checkup.listen_error}", advice)
    disk = checkup.disk_free_bytes
    if disk is None:
        advice = "start in a folder that all hosts have, or launch with --workdir"
        text = f"there is no working folder {report.workdir}"
        yield problem("error", "disk", text, advice, unhealthy=True)
    elif disk < _MIN_DISK_BYTES:
        text = f"{size(disk)} free in {report.workdir}"
        yield problem("warning", "disk", text, "make room", unhealthy=True)
    if checkup.memory_free_bytes < _MIN_MEMORY_BYTES:
        text = f"{size(checkup.memory_free_bytes)} of memory free"
        yield problem("warning", "memory", text, "end what takes it", unhealthy=True)
    yield from _gpu_health(report.host, checkup.gpu_report)
    shm = checkup.shm_free_bytes
    if shm is None or shm < _MIN_SHM_BYTES:
        text = "there is no /dev/shm" if shm is None else f"{size(shm)} free in /dev/shm"
        advice = "give it more room: docker --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        yield problem("warning", "shm", text, advice)
    if gpus and checkup.memlock_bytes is not None:
        text = f"locked memory is limited to {size(checkup.memlock_bytes)}, which RDMA trips over"
        yield problem("warning", "memlock", text, "ulimit -l unlimited, where sshd or slurmd is started")
    if checkup.nofile is not None and checkup.nofile < _MIN_NOFILE:
        text = f"only {checkup.nofile} open files are allowed"
        yield problem("warning", "nofile", text, "ulimit -n 65536, in limits.conf or where sshd is started")
    if text := _bad_interface(report, checkup, several=several):
        advice = (
            "set NCCL_SOCKET_IFNAME to one that it has" if checkup.nccl_setting else "choose with --iface"
        )
        yield problem("error" if gpus else "warning", "NCCL", text, advice)
    elif gpus and report.meets_by and not checkup.nccl_setting and _goes_astray(report.meets_by, checkup):
        text = f"NCCL takes {checkup.nccl_interface}, but the hosts meet by {report.meets_by}"
        yield problem(
            "warning", "NCCL", text, "if they cannot reach each other by the first, choose with --iface"
        )


def _gpu_health(host: str, found: GpuReport) -> Iterator[Problem]:
    """Yield what is wrong with the GPUs themselves."""
    if found.unknown:
        text = f"the health of its GPUs is unknown: {found.unknown}"
        advice = "pip install 'zlaunch[health]' there" if "nvidia-ml-py" in found.unknown else ""
        yield Problem(host, "warning", "GPUs", text, advice, unhealthy=True)
    for gpu in found.gpus:
        if problems := gpu.problems():
            text = f"GPU {gpu.token}: {'; '.join(problems)}"
            yield Problem(host, "warning", "GPUs", text, "nvidia-smi -q shows more", unhealthy=True)


def _goes_astray(meets_by: str, checkup: Checkup) -> bool:
    """Tell whether NCCL takes another network than the hosts meet on; InfiniBand (ib*) beside it is fine."""
    return checkup.nccl_interface != meets_by and not checkup.nccl_interface.startswith("ib")


def _bad_interface(report: HostReport, checkup: Checkup, *, several: bool) -> str:
    """Return why NCCL would not find its way; empty when it would."""
    setting = checkup.nccl_setting
    if setting is not None and setting == report.iface:
        return ""  # --iface has been looked at already
    chooser = f"NCCL_SOCKET_IFNAME={setting}" if setting else "NCCL"
    if not checkup.nccl_interface:
        return f"{chooser} fits none of its interfaces"
    return f"{chooser} takes the loopback interface" if several and checkup.nccl_interface == "lo" else ""


def _differing(reports: Sequence[HostReport]) -> Iterator[Problem]:
    """Yield the differences between the hosts that answered; most of them are taken to be right."""
    same = "install the same version everywhere"
    checks: tuple[tuple[str, Callable[[HostReport], str | None], str], ...] = (
        ("python", _python, same),
        ("torch", _torch, same),
        ("GPUs", describe_gpus, "choose hosts or slots that are alike with --include"),
    )
    for check, value_of, advice in checks:
        values = {report.host: value for report in reports if (value := value_of(report))}
        counts = Counter(values.values())
        usual = max(counts, key=lambda value: counts[value], default="")
        for host, value in values.items():
            if value != usual:
                others = [name for name in values if values[name] == usual]
                where = ", ".join(others) if len(others) < 4 else f"{len(others)} other hosts"
                yield Problem(host, "warning", check, f"{value}, but {usual} on {where}", advice)


def _python(report: HostReport) -> str | None:
    return f"Python {report.facts.python}" if report.facts is not None else None


def _torch(report: HostReport) -> str | None:
    version = report.checkup.torch if report.checkup is not None else None
    return f"torch {version}" if version is not None else None


def describe_gpus(report: HostReport) -> str | None:
    """Return how many GPUs of which kind may be used; None when the host has not said."""
    if report.facts is None:
        return None
    count = len(report.facts.devices)
    models = sorted(set(report.checkup.models)) if report.checkup and count else []
    return " ".join([f"{count} x" if models else str(count), " / ".join(models)]).strip()


def size(count: int) -> str:
    """Format a number of bytes for people: `7.8 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count, 1).bit_length() - 1, 49) // 10
    value = count / (1 << 10 * power)
    return f"{value:.3g} {units[power]}" if value < 999.5 else f"{value:.0f} {units[power]}"
