"""A module `pynvml` of made-up GPUs. Its names, arguments and results are those of nvidia-ml-py 13.615.71."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = {
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
    "NVML_CLOCK_SM": 1,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "nvmlClocksEventReasonGpuIdle": 0x1,
    "nvmlClocksEventReasonSwPowerCap": 0x4,
    "nvmlClocksEventReasonHwSlowdown": 0x8,
    "nvmlClocksEventReasonSwThermalSlowdown": 0x20,
    "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
    "NVML_GPU_FABRIC_STATE_COMPLETED": 3,
}
GPU: dict[str, Any] = {
    "uuid": "GPU-0",
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetTemperatureThreshold": 90,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "fabric": (0, bytes(16), 0),
}
"""Answers of a healthy GPU. The module raises answers that are exceptions. `fabric` has state, cluster and
clique.
"""


class FabricInfo(ctypes.Structure):
    """Is nvidia-ml-py's c_nvmlGpuFabricInfo_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]


def make_nvml(*gpus: Mapping[str, Any], init: str = "", without: tuple[str, ...] = ()) -> ModuleType:
    """Return the module; each of `gpus` has what differs from a healthy one.

    Args:
        init: the name of the error of nvmlInit.
        without: functions that this version does not have.
    """
    made: Any = ModuleType("pynvml")
    made.__dict__.update(NAMES)
    made.NVMLError = type("NVMLError", (Exception,), {})
    for name in (
        "NotSupported",
        "FunctionNotFound",
        "NoPermission",
        "GpuIsLost",
        "NotFound",
        "DriverNotLoaded",
    ):
        setattr(made, f"NVMLError_{name}", type(f"NVMLError_{name}", (made.NVMLError,), {}))
    known = [{**GPU, "uuid": f"GPU-{index}", "bus": 0x3B + index, **gpu} for index, gpu in enumerate(gpus)]
    calls: list[str] = made.__dict__.setdefault("calls", [])

    def error(name: str, text: str = "") -> Exception:
        kind: type[Exception] = getattr(made, f"NVMLError_{name}")
        return kind(text or name)

    def start() -> None:
        calls.append("init")
        if init:
            raise error(init, "Driver Not Loaded")

    def by_uuid(uuid: str) -> Any:
        for gpu in known:
            if uuid == gpu["uuid"]:
                return gpu
            if uuid in gpu.get("instances", ()):
                return {"parent": gpu}
        raise error("NotFound", "Not Found")

    def reader(name: str) -> Any:
        def read(handle: Mapping[str, Any], *_about: int) -> Any:
            value = handle[name]
            if isinstance(value, str):
                raise error(value, "GPU is lost" if value == "GpuIsLost" else "")
            return value

        return read

    made.nvmlInit = start
    made.nvmlShutdown = lambda: calls.append("shutdown")
    made.nvmlDeviceGetHandleByIndex = lambda index: known[index]
    made.nvmlDeviceGetHandleByUUID = by_uuid
    made.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda handle: handle["parent"]
    made.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(domain=0, bus=handle["bus"], device=0)
    for name in GPU.keys() - {"uuid", "fabric", *without}:
        setattr(made, name, reader(name))

    def fabric(handle: Mapping[str, Any], to: Any) -> int:
        values = reader("fabric")(handle)
        found = to._obj
        found.state = values[0]
        found.clusterUuid[:] = values[1]
        found.cliqueId = values[2]
        return 0

    if "nvmlDeviceGetGpuFabricInfoV" not in without:
        made.c_nvmlGpuFabricInfoV_t = FabricInfo
        made.nvmlDeviceGetGpuFabricInfoV = fabric
    module: ModuleType = made
    return module
