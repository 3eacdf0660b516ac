"""Read the health of NVIDIA GPUs: by NVML (the package nvidia-ml-py) and from the kernel's log.

Runs on the node, in the agent. `zlaunch doctor` and `--health` judge what it returns.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

KERNEL_LOG = Path("/dev/kmsg")
_BAD_XIDS = frozenset((48, 62, 64, 74, 79, 95, 119, 120, 140, 143))
"""Errors of the GPU itself, by NVIDIA's list: memory that could not be corrected or remapped, NVLink, a GPU
off the bus, its microcontrollers. The others are mostly mistakes of programs.
"""
_RECENT_S = 24 * 3600.0
"""An Xid of the last day counts: the kernel's log does not show when a GPU was reset."""
_BAD_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
}
"""Reasons for low clocks that are no normal state; idle GPUs and power caps are."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)[^)]*\): (\d+)")
_LOG_RECORD_BYTES = 1 << 13


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Holds what one GPU says about itself; None where the GPU or its driver cannot tell."""

    token: str
    """Its token in CUDA_VISIBLE_DEVICES."""
    error: str = ""
    """Why NVML cannot read it, such as "GPU is lost"."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The temperature at which it slows down."""
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    """The clock of its multiprocessors, and the highest one."""
    throttled_by: tuple[str, ...] = ()
    ecc_errors: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded."""
    needs_reset: bool | None = None
    """Faulty memory is taken out of use at the next reset."""
    remap_failed: bool | None = None
    """Faulty memory could not be taken out of use."""
    xids: tuple[int, ...] = ()
    """Its errors in the kernel's log of the last day."""

    def problems(self) -> list[str]:
        """Return what is wrong with it."""
        bad = [str(xid) for xid in self.xids if xid in _BAD_XIDS]
        hot = self.temperature_c is not None and self.slowdown_c is not None
        found = {
            self.error: bool(self.error),
            f"Xid {', '.join(bad)} in the kernel log of the last day": bool(bad),
            f"{self.ecc_errors} uncorrected ECC error{'s' if self.ecc_errors != 1 else ''}": self.ecc_errors,
            "faulty memory waits for a reset of the GPU": self.needs_reset,
            "faulty memory could not be remapped": self.remap_failed,
            f"throttled by {', '.join(self.throttled_by)}": bool(self.throttled_by),
            f"{self.temperature_c} C, and it slows down at {self.slowdown_c} C": hot
            and (self.temperature_c or 0) >= (self.slowdown_c or 0),
        }
        return [text for text, is_so in found.items() if is_so]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Holds what a node can tell about its GPUs."""

    gpus: tuple[GpuHealth, ...] = ()
    unknown: str = ""
    """Why NVML says nothing about any of them."""
    log_unknown: str = ""
    """Why Xid errors are not known."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> GpuReport:
        """Read what `as_dict` has written, after its way as JSON."""
        lists = ("throttled_by", "xids")
        gpus = [{**each, **{name: tuple(each[name]) for name in lists}} for each in values["gpus"]]
        return GpuReport(tuple(GpuHealth(**gpu) for gpu in gpus), values["unknown"], values["log_unknown"])


def examine_gpus(tokens: Sequence[str], kernel_log: Path = KERNEL_LOG) -> GpuReport:
    """Examine the GPUs of these tokens of CUDA_VISIBLE_DEVICES: numbers, or UUIDs of GPUs and MIG instances.

    A number means the GPU that NVML counts so: on a machine with several models, set
    CUDA_DEVICE_ORDER=PCI_BUS_ID for CUDA to count them in the same order.
    """
    if not tokens:
        return GpuReport()
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return GpuReport(unknown="nvidia-ml-py is not installed there")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport(unknown=f"NVML: {error}")
    try:
        found = [_examine(nvml, token) for token in tokens]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    try:
        xids = _recent_xids(kernel_log)
    except OSError as error:
        return GpuReport(tuple(gpu for gpu, _ in found), log_unknown=f"{kernel_log}: {error.strerror}")
    return GpuReport(tuple(replace(gpu, xids=tuple(xids.get(place, ()))) for gpu, place in found))


_Place = tuple[int, int, int]
"""Domain, bus and device of PCI."""


def _examine(nvml: Any, token: str) -> tuple[GpuHealth, _Place | None]:
    place = None
    try:
        if token.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(token))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(token)
        if token.startswith("MIG-"):
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        bus = nvml.nvmlDeviceGetPciInfo(handle)
        place = int(bus.domain), int(bus.bus), int(bus.device)
        return _read(nvml, token, handle), place
    except nvml.NVMLError as error:
        return GpuHealth(token, error=str(error)), place


def _read(nvml: Any, token: str, handle: Any) -> GpuHealth:
    """Read a GPU. Raises NVMLError for one that does not answer."""
    unable = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission)

    def ask(name: str, *about: Any) -> Any:
        function: Callable[..., Any] | None = getattr(nvml, name, None)
        if function is None:  # of another version of nvidia-ml-py
            return None
        try:
            return function(handle, *about)
        except unable:
            return None

    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
    _, _, remap_pending, remap_failed = ask("nvmlDeviceGetRemappedRows") or (None,) * 4
    retire_pending = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    pending = [each for each in (remap_pending, retire_pending) if each is not None]
    return GpuHealth(
        token,
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        throttled_by=tuple(text for name, text in _BAD_REASONS.items() if reasons & getattr(nvml, name, 0)),
        ecc_errors=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        needs_reset=any(pending) if pending else None,
        remap_failed=None if remap_failed is None else bool(remap_failed),
    )


def _recent_xids(kernel_log: Path) -> dict[_Place | None, list[int]]:
    """Return the Xid errors of the last day by GPU, each once. Raises OSError."""
    found: dict[_Place | None, list[int]] = {}
    since_s = time.monotonic() - _RECENT_S
    for record in _log_records(kernel_log):
        match = _XID.search(record)
        if match is None or int(record.split(",", 3)[2]) / 1e6 < since_s:
            continue
        place = int(match[1], 16), int(match[2], 16), int(match[3], 16)
        known = found.setdefault(place, [])
        if (xid := int(match[4])) not in known:
            known.append(xid)
    return found


def _log_records(kernel_log: Path) -> list[str]:
    """Read the kernel's records, `priority,number,microseconds,flags;text`, without waiting for new ones."""
    records: list[bytes] = []
    log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(log, _LOG_RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # newer records have overwritten the next one
                continue
            if not record:
                break
            records.append(record)
    finally:
        os.close(log)
    return b"".join(records).decode("utf-8", "replace").splitlines()
