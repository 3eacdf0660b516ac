"""Test the slots of this machine, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from zlaunch.system.machine import Devices, discover, visible_for_workers

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = [f"MIG-{number}a7b1c2d-0000-5000-8000-000000000000" for number in range(2)]


def machine(folder: Path, *, proc: int, dev: int, visible: str | None = None) -> Devices:
    for index in range(proc):
        (folder / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    (folder / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(dev))):
        (folder / "dev" / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return discover(environ, proc=folder / "gpus", dev=folder / "dev")


@pytest.mark.parametrize(("proc", "dev", "count"), [(0, 0, 0), (4, 4, 4), (4, 0, 4), (0, 2, 2), (8, 1, 1)])
def test_counting(tmp_path: Path, proc: int, dev: int, count: int) -> None:
    assert machine(tmp_path, proc=proc, dev=dev).tokens == tuple(map(str, range(count)))


@pytest.mark.parametrize(
    ("says", "count"),
    [("echo GPU 0: NVIDIA A; echo GPU 1: NVIDIA B", 2), ("exit 9", 1), (None, 1)],
)
def test_wsl_has_one_device_file(tmp_path: Path, says: str | None, count: int) -> None:
    dev, wsl = tmp_path / "dev", tmp_path / "wsl"
    dev.mkdir()
    wsl.mkdir()
    (dev / "dxg").touch()
    assert not discover({}, proc=tmp_path / "gpus", dev=dev, wsl=wsl).tokens, "another maker's GPU"
    (wsl / "libcuda.so.1").touch()
    if says is not None:
        (wsl / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
        (wsl / "nvidia-smi").chmod(0o755)
    found = discover({}, proc=tmp_path / "gpus", dev=dev, wsl=wsl)
    assert found.tokens == tuple(map(str, range(count)))


@pytest.mark.parametrize(
    ("visible", "tokens"),
    [
        ("2,0", ("2", "0")),
        (" 1 , 3", ("1", "3")),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
        ("0,9,1", ("0",)),
        ("NoDevFiles", ()),
        ("0,0", ()),
        (f"{UUID},1", (UUID, "1")),
        (",".join(MIG), tuple(MIG)),
    ],
)
def test_visible_devices_by_the_rules_of_cuda(tmp_path: Path, visible: str, tokens: tuple[str, ...]) -> None:
    assert machine(tmp_path, proc=4, dev=4, visible=visible).tokens == tokens


@pytest.mark.parametrize("visible", ["0,1", UUID, MIG[0]])
def test_without_a_gpu_nothing_is_visible(tmp_path: Path, visible: str) -> None:
    assert machine(tmp_path, proc=0, dev=0, visible=visible).tokens == ()


def test_description_says_what_hides_the_rest(tmp_path: Path) -> None:
    assert machine(tmp_path, proc=4, dev=4, visible="3").describe() == "1 GPU (CUDA_VISIBLE_DEVICES=3)"
    assert Devices(("0", "1"), None).describe() == "2 GPUs"


def test_workers_share_the_list_but_mig_instances_are_alone() -> None:
    assert visible_for_workers(["2", UUID]) == (f"2,{UUID}",) * 2
    assert visible_for_workers(MIG) == tuple(MIG)
    assert visible_for_workers([]) == ()
