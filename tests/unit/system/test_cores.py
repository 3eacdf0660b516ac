"""Test which CPU cores a worker gets, by the files that Linux and the driver have of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.plan.checks import how_to_bind
from zlaunch.plan.options import Launch, Program
from zlaunch.system.cores import (
    Cores,
    cpus_near,
    flat,
    parse_cpus,
    split_cores,
    split_near,
    usable_cores,
    written,
)

CORES = 8
"""Physical cores of each of the two NUMA nodes; core c has the CPUs c and c + 16."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server with two NUMA nodes, hyper-threads, and four GPUs, two near each node."""
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        first = node * CORES
        (folder / "cpulist").write_text(f"{first}-{first + 7},{first + 16}-{first + 23}\n")
    for cpu in range(4 * CORES):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 16},{cpu % 16 + 16}\n")
    for index, address in enumerate(("0000:17:00.0", "0000:65:00.0", "0000:CA:00.0", "0000:E3:00.0")):
        folder = tmp_path / f"sys/bus/pci/devices/{address.lower()}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{index // 2}\n")
        folder = tmp_path / f"proc/{address}"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{index}abc\nDevice Minor: \t {index}\n"
        (folder / "information").write_text(text)
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{index}").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4 * CORES)))
    return tmp_path


def cores_of(machine: Path) -> Cores:
    return usable_cores(machine / "sys")


def near(machine: Path, *tokens: str, **environ: str) -> tuple[tuple[int, ...], ...]:
    return cpus_near(tokens, environ, sys=machine / "sys", proc=machine / "proc", dev=machine / "dev")


def launch(bind: str = "node", core_list: tuple[int, ...] | None = None) -> Launch:
    program = Program("script", "t.py", (), True)
    return Launch(program=program, run_id="run", run_dir="", workdir="", bind=bind, core_list=core_list)


NODES = ((*range(8), *range(16, 24)), (*range(8, 16), *range(24, 32)))


def test_workers_get_whole_physical_cores_of_one_numa_node(machine: Path) -> None:
    cores = cores_of(machine)
    assert cores[:2] == ((0, 16), (1, 17)) and cores[8] == (8, 24) and len(cores) == 16
    shares = split_cores(cores, 4)
    assert written(shares[0]) == "0-3,16-19" and written(shares[2]) == "8-11,24-27"
    assert set(flat(cores)) == {cpu for share in shares for cpu in share}
    assert split_cores(cores[:1], 3) == ((0, 16),) * 3


def test_cores_that_the_process_may_not_use_are_left_out(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 17, 9})
    assert cores_of(machine) == ((1, 17), (2,), (9,))
    assert near(machine, "0", "3") == ((1, 2, 17), (9,))


def test_where_linux_says_nothing_each_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 0})
    assert usable_cores(tmp_path) == ((0,), (2,))
    assert cpus_near(["0"], {}, sys=tmp_path, proc=tmp_path, dev=tmp_path) == ((),)


def test_a_gpu_is_near_the_cores_of_its_numa_node(machine: Path) -> None:
    assert near(machine, "0", "1", "2", "3") == (NODES[0], NODES[0], NODES[1], NODES[1])
    assert near(machine, "3", "GPU-0abc", "GPU-2") == (NODES[1], NODES[0], NODES[1])
    assert near(machine, "7", "GPU-", "MIG-1") == ((), (), ()), "nobody knows these"
    (machine / "sys/bus/pci/devices/0000:17:00.0/numa_node").write_text("-1\n")
    assert near(machine, "0") == ((),)


def test_numbers_of_different_models_have_cudas_own_order(machine: Path) -> None:
    path = machine / "proc/0000:17:00.0/information"
    path.write_text(path.read_text().replace("H100", "T4"))
    assert near(machine, "0", "GPU-0abc") == ((), NODES[0])
    assert near(machine, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == (NODES[0],)


def test_gpus_that_a_container_cannot_open_do_not_count(machine: Path) -> None:
    for hidden in (0, 1):
        (machine / f"dev/nvidia{hidden}").unlink()
    assert near(machine, "0", "1") == (NODES[1], NODES[1])


def test_by_default_a_worker_gets_the_cores_near_its_gpu(machine: Path) -> None:
    cores, gpus = cores_of(machine), near(machine, "0", "1", "2", "3")
    assert launch().bound_cores(cores, gpus, 4, "n") == gpus
    assert launch("none").bound_cores(cores, gpus, 4, "n") == ()
    assert launch().bound_cores(cores, [], 4, "n") == (), "CPU workers"
    assert launch().bound_cores(cores, [NODES[0], ()], 2, "n") == (), "one is unknown"
    assert launch().bound_cores(cores[:8], [NODES[0]], 1, "n") == (), "there is no other node"
    assert launch().shares_cores and not launch("cores").shares_cores


def test_shares_of_the_cores_near_a_gpu_do_not_overlap(machine: Path) -> None:
    gpus = near(machine, "0", "2", "3")
    shares = launch("cores").bound_cores(cores_of(machine), gpus, 3, "n")
    assert list(map(written, shares)) == ["0-7,16-23", "8-11,24-27", "12-15,28-31"]
    assert shares == split_near(cores_of(machine), gpus)
    assert list(map(written, launch("cores").bound_cores(cores_of(machine), [], 2, "n"))) == [
        "0-7,16-23",
        "8-15,24-31",
    ]


def test_a_list_of_cores_is_shared_out_as_it_is(machine: Path) -> None:
    listed = launch("cores", (4, 5, 20, 21))
    assert listed.bound_cores(cores_of(machine), near(machine, "3", "3"), 2, "n") == ((4, 5), (20, 21))
    with pytest.raises(LaunchError, match="n has no core 99 available; it has 32"):
        launch("cores", (99,)).bound_cores(cores_of(machine), [], 1, "n")


def test_options_that_contradict_each_other_are_refused() -> None:
    assert how_to_bind(None, False, has_list=False) == "node"
    assert how_to_bind("none", False, has_list=False) == "none"
    assert how_to_bind("cores", True, has_list=True) == how_to_bind(None, False, has_list=True) == "cores"
    with pytest.raises(LaunchError, match="--bind none and --bind_cores_to_rank cannot be used together"):
        how_to_bind("none", True, has_list=False)
    with pytest.raises(LaunchError, match="--bind node and --bind_core_list"):
        how_to_bind("node", False, has_list=True)


@pytest.mark.parametrize("text", ["", "3", "0-3", "0-1,8", "2,4,6-9"])
def test_a_list_of_cpus_is_read_as_it_is_written(text: str) -> None:
    assert written(parse_cpus(text)) == text
