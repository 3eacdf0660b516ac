"""Test what a node tells about its GPUs, from a made-up NVML and kernel log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.system.fake_nvml import make_nvml
from zlaunch.system.gpu_health import GpuReport, examine_gpus

Install = Callable[[ModuleType], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    return lambda module: monkeypatch.setitem(sys.modules, "pynvml", module)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An empty kernel log."""
    path = tmp_path / "kmsg"
    path.write_text("")
    return path


def record(text: str, *, hours_ago: float = 0.0) -> str:
    return f"6,1234,{int((time.monotonic() - hours_ago * 3600) * 1e6)},-;{text}\n"


def test_a_healthy_gpu(install: Install, log: Path) -> None:
    nvml: Any = make_nvml({}, {})
    install(nvml)
    report = examine_gpus(["1"], log)
    (gpu,) = report.gpus
    assert (gpu.token, gpu.temperature_c, gpu.slowdown_c) == ("1", 41, 90)
    assert (gpu.clock_mhz, gpu.max_clock_mhz, gpu.ecc_errors, gpu.needs_reset) == (345, 1980, 0, False)
    assert gpu.problems() == [] and not report.unknown and not report.log_unknown
    assert nvml.calls == ["init", "shutdown"]
    assert GpuReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report


@pytest.mark.parametrize(
    ("differs", "problem"),
    [
        ({"nvmlDeviceGetTemperature": 93}, "93 C, and it slows down at 90 C"),
        ({"nvmlDeviceGetTotalEccErrors": 1}, "1 uncorrected ECC error"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "faulty memory waits for a reset of the GPU"),
        ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, "faulty memory waits for a reset of the GPU"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "faulty memory could not be remapped"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, None),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x48},
         "throttled by hardware slowdown, hardware thermal slowdown"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "throttled by power brake"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x20}, "throttled by software thermal slowdown"),
        ({"nvmlDeviceGetClockInfo": "GpuIsLost"}, "GPU is lost"),
        ({"nvmlDeviceGetTotalEccErrors": "NotSupported"}, None),
        ({"nvmlDeviceGetRemappedRows": "NotSupported"}, None),
        ({"nvmlDeviceGetTemperatureThreshold": "NoPermission"}, None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_gpu(
    install: Install, log: Path, differs: dict[str, Any], problem: str | None
) -> None:
    install(make_nvml(differs))
    (gpu,) = examine_gpus(["0"], log).gpus
    assert gpu.problems() == ([] if problem is None else [problem])


def test_what_a_driver_or_its_package_cannot_tell_is_unknown(install: Install, log: Path) -> None:
    missing = ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons")
    install(make_nvml({"nvmlDeviceGetTotalEccErrors": "FunctionNotFound"}, without=missing))
    (gpu,) = examine_gpus(["0"], log).gpus
    assert (gpu.temperature_c, gpu.ecc_errors, gpu.throttled_by, gpu.problems()) == (None, None, (), [])


def test_gpus_are_named_by_number_uuid_and_mig_instance(install: Install, log: Path) -> None:
    install(make_nvml({}, {"instances": ("MIG-7",), "nvmlDeviceGetTotalEccErrors": 2}))
    gpus = examine_gpus(["0", "GPU-1", "MIG-7", "GPU-9"], log).gpus
    assert [gpu.ecc_errors for gpu in gpus] == [0, 2, 2, None]
    assert gpus[3].problems() == ["Not Found"]


def test_xid_errors_of_the_last_day_count_on_their_gpu(install: Install, log: Path) -> None:
    install(make_nvml({}, {}))
    log.write_text(
        record(
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.", hours_ago=25
        )
        + record("NVRM: Xid (PCI:0000:3c:00): 13, pid=1, name=python, Graphics Exception")
        + record("usb 1-1: new device") * 400
        + record("NVRM: Xid (PCI:0000:3c:00.0): 79, pid=1, name=python, GPU has fallen off the bus.")
        + record("NVRM: Xid (PCI:0000:3c:00): 79, pid=2, name=python, GPU has fallen off the bus.")
    )
    first, second = examine_gpus(["0", "1"], log).gpus
    # the clock of a machine that has just booted may not reach back so far
    assert first.xids == () or time.monotonic() < 25 * 3600
    assert second.xids == (13, 79) and second.problems() == ["Xid 79 in the kernel log of the last day"]


def test_a_log_that_cannot_be_read_is_said(install: Install, tmp_path: Path) -> None:
    install(make_nvml({}))
    report = examine_gpus(["0"], tmp_path / "nothing")
    assert report.log_unknown == f"{tmp_path / 'nothing'}: No such file or directory"
    assert report.gpus[0].problems() == []


def test_without_nvml_the_health_is_unknown(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine_gpus([]) == GpuReport()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert examine_gpus(["0"]).unknown == "nvidia-ml-py is not installed there"
    install(make_nvml(init="DriverNotLoaded"))
    assert examine_gpus(["0"]).unknown == "NVML: Driver Not Loaded"
