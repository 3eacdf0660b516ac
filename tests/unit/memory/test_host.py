"""Test how much of a machine's memory a process may take."""

from __future__ import annotations

import pytest

from zlaunch.runtime.host_memory import host_bytes, slurm_bytes


@pytest.mark.parametrize(
    ("environ", "mebibytes"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "512"}, 512),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, 400),
        ({"SLURM_MEM_PER_CPU": "100"}, None),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # --mem 0 is all memory of the node
        ({"SLURM_MEM_PER_NODE": "much"}, None),
    ],
)
def test_the_memory_of_a_slurm_job(environ: dict[str, str], mebibytes: int | None) -> None:
    assert slurm_bytes(environ) == (None if mebibytes is None else mebibytes << 20)


def test_the_jobs_memory_bounds_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_bytes() > 32 << 20
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "32")
    assert host_bytes() == 32 << 20
