"""Test what `zlaunch doctor` finds wrong, on made-up hosts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zlaunch import __version__
from zlaunch.cli.doctor import COLUMNS, table_rows
from zlaunch.node.rendezvous import Handshake
from zlaunch.system.checkup import (
    Checkup,
    HostReport,
    describe_gpus,
    driver_version,
    gpu_models,
    judge,
    nccl_interface,
    own_checkup,
    size,
)
from zlaunch.system.gpu_health import GpuHealth, GpuReport
from zlaunch.system.machine import Facts
from zlaunch.system.messages import Listen
from zlaunch.system.network import own_address_towards

GIB = 1 << 30
FACTS = Facts(
    hostname="n",
    version=__version__,
    python="3.11.7",
    cores=((0, 1),),
    devices=(),
    visible=None,
    addresses={"eth0": ("10.0.0.1",)},
)
CHECKUP = Checkup(
    torch="2.6.0",
    models=(),
    driver=None,
    memory_free_bytes=64 * GIB,
    gpu_report=GpuReport(),
    disk_free_bytes=100 * GIB,
    shm_free_bytes=8 * GIB,
    memlock_bytes=8 << 20,
    nofile=1024,
    nccl_setting=None,
    nccl_interface="eth0",
    listen_error="",
)
HOT = GpuReport((GpuHealth("0"), GpuHealth("1", temperature_c=95, slowdown_c=90)))
NO_NVML = GpuReport(unknown="nvidia-ml-py is not installed there")
GPUS: dict[str, Any] = {"devices": ("0", "1")}
H100: dict[str, Any] = {"models": ("NVIDIA H100",) * 2, "driver": "550.54.15", "memlock_bytes": None}


def report(
    host: str = "n1", *, facts: Mapping[str, Any] = {}, checkup: Mapping[str, Any] = {}, **more: Any
) -> HostReport:
    """A host where all is well but for what is given."""
    own = {"workdir": "/data", "skew_s": 0.01, "slots": 2, **more}
    return HostReport(host=host, facts=replace(FACTS, **facts), checkup=replace(CHECKUP, **checkup), **own)


def gpu_report(
    host: str = "n1", *, facts: Mapping[str, Any] = {}, checkup: Mapping[str, Any] = {}, **more: Any
) -> HostReport:
    return report(host, facts={**GPUS, **facts}, checkup={**H100, **checkup}, **more)


def told(*reports: HostReport) -> list[tuple[str, str, str]]:
    return [(problem.host, problem.level, problem.check) for problem in judge(reports)]


def test_good_hosts_have_no_problems() -> None:
    assert told(report("n1"), report("n2")) == []
    assert told(gpu_report("n1"), gpu_report("n2", meets_by="eth0")) == []
    assert told(report(checkup={"nccl_interface": "lo"})) == [], "a machine alone needs no network"


@pytest.mark.parametrize(
    ("bad", "level", "check", "words"),
    [
        (HostReport(host="n1", error="refused our keys: ssh-copy-id n1"), "error", "host", "ssh-copy-id"),
        (report(facts={"version": "0.0.9"}), "error", "zlaunch", "zlaunch 0.0.9 there"),
        (report(checkup={"torch": None}), "error", "torch", "no torch"),
        (gpu_report(slots=8), "error", "GPUs", "slots=8 in the hostfile, but it has 2 GPUs"),
        (report(meet_error="it cannot reach n0"), "error", "node 0", "cannot reach n0"),
        (report(iface="ib0"), "error", "NCCL", "--iface ib0: no such interface is up; it has eth0"),
        (report(checkup={"listen_error": "Permission denied"}), "error", "node 0", "Permission denied"),
        (report(checkup={"disk_free_bytes": None}), "error", "disk", "no working folder /data"),
        (report(checkup={"disk_free_bytes": GIB - 1}), "warning", "disk", "free in /data"),
        (report(checkup={"memory_free_bytes": GIB - 1}), "warning", "memory", "of memory free"),
        (gpu_report(checkup={"gpu_report": HOT}), "warning", "GPUs", "GPU 1: 95 C, and it slows down at 90"),
        (gpu_report(checkup={"gpu_report": NO_NVML}), "warning", "GPUs", "unknown: nvidia-ml-py is not"),
        (report(checkup={"shm_free_bytes": 63 << 20}), "warning", "shm", "63 MiB free in /dev/shm"),
        (report(checkup={"shm_free_bytes": None}), "warning", "shm", "no /dev/shm"),
        (report(skew_s=-3.21), "warning", "clock", "3.2 s behind"),
        (report(skew_s=1.5), "warning", "clock", "1.5 s ahead"),
        (report(checkup={"nofile": 256}), "warning", "nofile", "only 256 open files"),
        (gpu_report(checkup={"memlock_bytes": 65536}), "warning", "memlock", "limited to 64 KiB"),
        (
            gpu_report(checkup={"nccl_setting": "ib", "nccl_interface": ""}),
            "error", "NCCL", "NCCL_SOCKET_IFNAME=ib fits none",
        ),
        (
            report(checkup={"nccl_setting": "ib", "nccl_interface": ""}),
            "warning", "NCCL", "NCCL_SOCKET_IFNAME=ib fits none",
        ),
        (gpu_report(meets_by="eth1"), "warning", "NCCL", "NCCL takes eth0, but the hosts meet by eth1"),
    ],
)  # fmt: skip
def test_one_problem(bad: HostReport, level: str, check: str, words: str) -> None:
    [problem] = judge([bad])
    assert (problem.host, problem.level, problem.check) == ("n1", level, check)
    assert words in problem.text
    assert check in COLUMNS
    assert bool(problem.advice) != check.startswith(("host", "node 0")) or "listen" in problem.text


def test_health_is_memory_disk_and_gpus() -> None:
    bad = {"torch": None, "nofile": 1, "memory_free_bytes": 1, "disk_free_bytes": 1, "gpu_report": HOT}
    found = judge([gpu_report("n1", checkup=bad)])
    assert [problem.check for problem in found if problem.unhealthy] == ["disk", "memory", "GPUs"]
    assert any(problem.unhealthy for problem in judge([report(checkup={"disk_free_bytes": None})]))


def test_limits_are_limits() -> None:
    well = {"memory_free_bytes": GIB, "disk_free_bytes": GIB, "shm_free_bytes": 64 << 20, "nofile": 1024}
    assert told(report(checkup=well, skew_s=1.0)) == []
    assert told(report(checkup={"nofile": None, "memlock_bytes": None})) == []
    assert told(gpu_report(checkup={"nccl_interface": "ib0"}, meets_by="eth0")) == [], "InfiniBand is welcome"


def test_the_odd_one_out_is_named() -> None:
    hosts = [gpu_report(name) for name in ("a", "b", "c")]
    assert told(*hosts, gpu_report("d", facts={"python": "3.10.2"})) == [("d", "warning", "python")]
    [problem] = judge([gpu_report("d", checkup={"torch": "2.5.1"}), *hosts])
    assert problem.host == "d" and problem.text == "torch 2.5.1, but torch 2.6.0 on a, b, c"
    [problem] = judge([*hosts, gpu_report("d", facts={"devices": ("0",)}, slots=None)])
    assert problem.text == "1 x NVIDIA H100, but 2 x NVIDIA H100 on a, b, c"
    [problem] = judge([*hosts, gpu_report("e"), gpu_report("d", checkup={"models": ("NVIDIA A100",) * 2})])
    assert problem.text == "2 x NVIDIA A100, but 2 x NVIDIA H100 on 4 other hosts"
    silent = HostReport(host="x", error="no such host: x")
    assert told(*hosts, silent) == [("x", "error", "host")]
    assert told(report("a"), report("b", checkup={"torch": None})) == [("b", "error", "torch")]


def test_problems_stand_in_the_order_of_hosts_errors_first() -> None:
    both = {"torch": None, "nofile": 1}
    found = told(report("b", checkup=both), report("a", checkup=both))
    assert found == [
        ("b", "error", "torch"), ("b", "warning", "nofile"),
        ("a", "error", "torch"), ("a", "warning", "nofile"),
    ]  # fmt: skip


def test_table_rows() -> None:
    reports = [
        gpu_report("n1", meets_by="eth0", checkup={"torch": None, "nofile": 1}),
        report("n2", meets_by="eth0", skew_s=-2.0, slots=None),
        HostReport(host="n3", error="no such host: n3"),
    ]
    problems = [problem for problem in judge(reports) if problem.check != "GPUs"]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table_rows(reports, problems)]
    assert [str(row["state"]) for row in rows] == ["error", "warning", "error"]
    assert (str(rows[0]["torch"]), rows[0]["torch"].style) == ("none", "bold red")
    assert (str(rows[0]["nofile"]), rows[0]["nofile"].style) == ("1", "yellow")
    assert str(rows[0]["GPUs"]) == "2 x NVIDIA H100" and str(rows[0]["memlock"]) == "unlimited"
    assert (str(rows[1]["clock"]), rows[1]["clock"].style) == ("-2.000 s", "yellow")
    assert str(rows[1]["interfaces"]) == "eth0 10.0.0.1" and str(rows[1]["node 0"]) == "by eth0"
    assert (rows[1]["torch"].style, str(rows[1]["disk"]), str(rows[1]["GPUs"])) == ("", "100 GiB", "0")
    assert rows[2]["host"].style == "bold red"
    assert {str(rows[2][column]) for column in COLUMNS[2:]} == {"-"}


@pytest.mark.parametrize(
    ("names", "setting", "taken"),
    [
        ("lo docker0 eth0 eth1", None, "eth0"),
        ("lo eth0 ib1", None, "ib1"),
        ("lo virbr0 docker0", None, "docker0"),
        ("lo", None, "lo"),
        ("lo eth0 eth1", "eth1", "eth1"),
        ("lo eth0 eth10 eth1", "=eth1", "eth1"),
        ("lo eth0 ens3", "ib,ens", "ens3"),
        ("lo docker0 eth0", "^lo,docker", "eth0"),
        ("lo docker0 eth0", "^docker", "lo"),
        ("lo eth10 eth1", "^=lo,eth10", "eth1"),
        ("lo eth0", "ib", ""),
    ],
)
def test_the_interface_that_nccl_takes(names: str, setting: str | None, taken: str) -> None:
    assert nccl_interface(names.split(), setting) == taken


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  12\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("something else\n", "unknown"),
    ],
)
def test_driver_and_models(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "nothing") is None
    for index, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA L4")):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 36\n")
    assert gpu_models(tmp_path / "gpus") == ("NVIDIA H100 80GB HBM3", "NVIDIA L4")
    assert gpu_models(tmp_path / "nothing") == ()


def test_gpus_are_counted_as_visible_and_named_as_there() -> None:
    assert (
        describe_gpus(gpu_report(checkup={"models": ("NVIDIA H100", "NVIDIA L4")}))
        == "2 x NVIDIA H100 / NVIDIA L4"
    )
    assert describe_gpus(gpu_report(checkup={"models": ()})) == "2"
    assert describe_gpus(report(checkup={"models": ("NVIDIA L4",)})) == "0"
    assert describe_gpus(HostReport(host="x", error="gone")) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (8 << 20, "8 MiB"), (5 * GIB // 2, "2.5 GiB")),
        *((1000 * GIB, "1000 GiB"), (3 << 40, "3 TiB"), (5 << 50, "5120 TiB")),
    ],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_own_checkup_travels_as_json(tmp_path: Path) -> None:
    found = own_checkup(str(tmp_path), None)
    assert found.torch is not None and found.disk_free_bytes and not found.listen_error
    assert Checkup.from_event(json.loads(json.dumps(found.as_event()))) == found
    assert own_checkup(str(tmp_path / "nothing"), "nosuch").disk_free_bytes is None
    assert own_checkup(str(tmp_path), "nosuch").nccl_interface == ""


def test_node_0_can_be_asked_to_listen_again() -> None:
    """Doctor looks for a meeting place once more without the host that cannot reach it."""
    sent: list[Any] = []
    accept: list[Callable[[], object]] = []
    handshake = Handshake(sent.append, lambda _fd, handler: accept.append(handler))
    for token in ("one", "two"):
        handshake.handle(Listen(0, token))
    assert sent[0] == sent[1] and len(accept) == 1
    answers: list[str | None] = []
    thread = threading.Thread(
        target=lambda: answers.append(own_address_towards("127.0.0.1", sent[0].port, b"two"))
    )
    thread.start()
    while thread.is_alive():
        accept[0]()
        thread.join(0.01)
    handshake.close()
    assert answers == ["127.0.0.1"]
