"""Test what zlaunch makes of the variables of mpirun, mpiexec and Flux."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zlaunch.errors import LaunchError
from zlaunch.launchers.found import BatchJob, read_job, read_task, take_pod

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "1"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "3"}
NAMES = ("hostfile", "launcher", "node_rank", "include", "exclude", "num_gpus", "num_nodes", "master_addr")


def taken(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], **options: Any) -> dict[str, Any]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {**dict.fromkeys(NAMES), "no_ssh": False, "master_port": 0, **options}
    take_pod(given, None)
    return given


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, FLUX])
def test_one_task_a_node_is_a_node(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    given = taken(monkeypatch, {**environ, "MASTER_ADDR": "n1"})
    assert given["pod"] and given["node_rank"] == 1 and given["num_nodes"] == 3
    assert given["master_addr"] == "n1" and given["num_gpus"] is None
    assert taken(monkeypatch, {}, master_addr="n2")["master_addr"] == "n2"
    assert taken(monkeypatch, {"ZLAUNCH_RUN_ID": "inside"})["pod"] is False


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, FLUX])
def test_it_has_to_be_said_where_node_0_is(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="no address of node 0 \\(this is node 1 of 3"):
        taken(monkeypatch, environ)


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**MPICH, "MPI_LOCALNRANKS": "3"},
        {**FLUX, "FLUX_JOB_NNODES": "2"},
    ],
)
def test_several_tasks_a_node_are_refused(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="started zlaunch 3 times, more than once per node"):
        taken(monkeypatch, environ, master_addr="n1")
    assert taken(monkeypatch, {}, launcher="local")["pod"] is False


def test_a_lone_task_is_none() -> None:
    assert read_task({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None and read_task({}) is None
    assert read_task({"PMI_RANK": "0", "PMI_SIZE": "4"}) is None  # SLURM's own, without MPICH
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_RANK=x: not a number"):
        read_task({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"})


def test_hosts_of_a_flux_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flux is not there: a script with its answer stands for it."""
    program = tmp_path / "flux"
    program.write_text('#!/bin/sh\n[ "$*" = "hostlist local" ] && echo "corona[171-172]"\n')
    program.chmod(0o755)
    environ = {"FLUX_URI": "local:///run/flux/local"}
    monkeypatch.setenv("PATH", "/bin")
    assert read_job(environ) is None
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert read_job(environ) == BatchJob("Flux job", ("corona171", "corona172"))
    program.write_text("#!/bin/sh\necho no broker >&2\nexit 3\n")
    with pytest.raises(LaunchError, match="`flux hostlist local`: no broker; use --hostfile"):
        read_job(environ)
