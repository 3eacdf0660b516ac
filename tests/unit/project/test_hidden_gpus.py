"""Test which tests use the GPUs of a machine; here two are faked."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import zlaunch
from tests.devices import HiddenGpus
from tests.e2e.helpers import run
from tests.runtime.workers import run_workers
from zlaunch.system.machine import Devices, discover

GPUS = "/proc/driver/nvidia/gpus"
FAKED = f'mount -t tmpfs tmpfs /proc/driver && mkdir -p {GPUS}/0 {GPUS}/1 && exec "$@"'
SAY = "import os\nprint(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'] or 'hidden')"


def two_gpus(environ: Any, folder: Path) -> Devices:
    """Discover what a machine with two GPUs shows under this environment."""
    for name in ("0", "1"):
        (folder / "gpus" / name).mkdir(parents=True, exist_ok=True)
    return discover(environ, proc=folder / "gpus", dev=folder / "dev")


def _place(folder: str) -> tuple[str, str]:
    """Join with a torch that reads CUDA_VISIBLE_DEVICES as CUDA does."""
    torch.cuda.device_count = lambda: len(two_gpus(os.environ, Path(folder)).tokens)
    torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
    torch.cuda.set_device = lambda device: None
    device = zlaunch.init_distributed()
    dist.barrier()  # a rank that ends at once can break the other's connection, which is being made
    return device.type, str(dist.get_backend())


def test_ranks_train_on_the_cpu(tmp_path: Path) -> None:
    assert two_gpus({}, tmp_path).tokens == ("0", "1")
    assert run_workers(_place, 2, str(tmp_path)) == [("cpu", "gloo")] * 2


@pytest.mark.needs("root", "namespaces", "mounts")
@pytest.mark.parametrize(("env", "seen"), [({}, "hidden"), ({"CUDA_VISIBLE_DEVICES": "0,1"}, "0,1")])
def test_launches_start_cpu_workers(tmp_path: Path, env: dict[str, str], seen: str) -> None:
    prefix = ("unshare", "--mount", "sh", "-c", FAKED, "sh")
    launch = run(tmp_path, "--num_gpus=2", "--log_ranks=all", script=SAY, prefix=prefix, env=env)
    assert launch.process.returncode == 0, launch.err
    assert [launch.log(rank).split() for rank in (0, 1)] == [["0", seen], ["1", seen]]


@pytest.mark.parametrize("given", [None, "1"])
def test_the_tests_for_a_gpu_see_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    outside = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    config = SimpleNamespace(workerinput={"cuda_visible_devices": outside})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hidden = HiddenGpus(cast(pytest.Config, config), partial(two_gpus, folder=tmp_path))

    def seen(name: str, mark: str | None, devices: str) -> tuple[str | None, bool]:
        options = SimpleNamespace(getoption=lambda _: devices)
        item = SimpleNamespace(
            nodeid=name, config=options, get_closest_marker=lambda kind: kind if kind == mark else None
        )
        protocol = hidden.pytest_runtest_protocol(cast(pytest.Item, item))
        next(protocol)
        found = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()
        protocol.close()
        return found

    on_gpu, on_cpu = (given, True), ("", False)
    assert seen("tests/gpu/test_it.py::test_it", "gpu", "cpu") == on_gpu
    assert seen("tests/unit/test_it.py::test_it", None, "cpu") == on_cpu
    assert seen("tests/runtime/test_it.py::test_it", "multi_gpu", "cpu") == on_cpu
    assert seen("tests/runtime/test_it.py::test_it", "multi_gpu", "cuda") == on_gpu
    assert seen("tests/runtime/test_it.py::test_it", None, "cuda") == on_cpu
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""

    node = SimpleNamespace(workerinput={})
    hidden.pytest_configure_node(node)
    assert node.workerinput == config.workerinput
    hidden.pytest_unconfigure()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == given


def _visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_rank_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    config = SimpleNamespace(workerinput={"cuda_visible_devices": {}})
    hidden = HiddenGpus(cast(pytest.Config, config), partial(two_gpus, folder=tmp_path))
    with hidden.shown():
        assert run_workers(_visible, 2) == ["0", "1"]
        with pytest.raises(pytest.skip.Exception, match="3 ranks need as many GPUs; this machine has 2"):
            run_workers(_visible, 3)
    assert run_workers(_visible, 3) == ["", "", ""]
