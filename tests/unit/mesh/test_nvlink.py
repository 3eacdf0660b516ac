"""Test how a GPU's NVLink domain is found, with a made-up NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.system.fake_nvml import make_nvml
from zlaunch.runtime.comm.nvlink import find_nvlink_domain

GPU = torch.device("cuda", 0)
RACK = bytes(range(16))


@pytest.fixture(autouse=True)
def has_gpu_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA numbers as 0 what NVML counts as 1, as it does with CUDA_VISIBLE_DEVICES=1."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))


def found_with(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> str | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return find_nvlink_domain(GPU)


def test_a_gpu_of_a_rack_is_in_its_cluster_and_clique(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = make_nvml({"fabric": (3, bytes(16), 0)}, {"fabric": (3, RACK, 7)})
    assert found_with(monkeypatch, nvml) == f"{RACK.hex()}/7"
    assert nvml.calls == ["init", "shutdown"]
    assert find_nvlink_domain(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "fabric",
    [
        (0, bytes(16), 0),  # no such links
        (2, RACK, 7),  # not ready
        (3, bytes(16), 0),  # the switches of one machine
        "NotSupported",
    ],
)
def test_other_gpus_are_in_none(monkeypatch: pytest.MonkeyPatch, fabric: object) -> None:
    nvml: Any = make_nvml({"fabric": (3, RACK, 7)}, {"fabric": fabric})
    assert found_with(monkeypatch, nvml) is None
    assert nvml.calls == ["init", "shutdown"]


def test_what_nvml_cannot_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_with(monkeypatch, None) is None, "nvidia-ml-py is not installed"
    assert found_with(monkeypatch, make_nvml(init="DriverNotLoaded")) is None
    old = make_nvml({}, {}, without=("nvmlDeviceGetGpuFabricInfoV",))
    assert found_with(monkeypatch, old) is None, "nvidia-ml-py is too old"
    assert found_with(monkeypatch, make_nvml({"fabric": (3, RACK, 7)})) is None, "NVML does not know the GPU"
