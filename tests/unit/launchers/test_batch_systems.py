"""Test what zlaunch makes of the variables of PBS, LSF and Grid Engine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from zlaunch.cli.main import main
from zlaunch.errors import LaunchError
from zlaunch.launchers.found import BatchJob, read_job


def test_hosts_of_each_system(tmp_path: Path) -> None:
    pbs, grid = tmp_path / "nodes", tmp_path / "hosts"
    pbs.write_text("n1.cluster\nn1.cluster\nn2.cluster\nn1.cluster\n")
    grid.write_text("a 8 all.q@a UNDEFINED\nb 8 all.q@b UNDEFINED\n")
    assert read_job({"PBS_NODEFILE": str(pbs), "PBS_JOBID": "7.head"}) == BatchJob(
        "PBS job 7.head", ("n1.cluster", "n2.cluster")
    )
    assert read_job({"PE_HOSTFILE": str(grid), "JOB_ID": "5"}) == BatchJob("Grid Engine job 5", ("a", "b"))
    assert read_job({"LSB_MCPU_HOSTS": "x 4 y 4", "LSB_JOBID": "3"}) == BatchJob("LSF job 3", ("x", "y"))
    assert read_job({"LSB_MCPU_HOSTS": " "}) is None and read_job({}) is None
    assert read_job({"LSB_MCPU_HOSTS": "x 4 y 4", "ZLAUNCH_RUN_ID": "inside"}) is None


def test_a_job_of_this_node_alone_starts_nothing_elsewhere() -> None:
    assert BatchJob("PBS job", (f"{socket.gethostname()}.some.domain",)).is_here
    assert not BatchJob("PBS job", ("elsewhere",)).is_here


def test_a_file_that_is_gone_is_named() -> None:
    with pytest.raises(LaunchError, match="PBS_NODEFILE is /none, which cannot be read: No such file"):
        read_job({"PBS_NODEFILE": "/none"})


def test_what_is_no_host_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a 8 all.q@a UNDEFINED\nb\0c 8 all.q@b UNDEFINED\n")
    with pytest.raises(LaunchError, match=r"Grid Engine lists 'b\\x00c' as a host"):
        read_job({"PE_HOSTFILE": str(tmp_path / "hosts")})
    with pytest.raises(LaunchError, match="LSF lists '-oProxyCommand=x' as a host"):
        read_job({"LSB_MCPU_HOSTS": "-oProxyCommand=x 4"})


def test_a_launch_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes"
    # not "n2", which may be in the path of the interpreter
    nodes.write_text("first-host\nfirst-host\nother-host\nother-host\n")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--dry_run", "--num_gpus=2", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "first-host" in shown and "other-host" in shown
    assert main(["--dry_run", "--launcher=local", "--num_gpus=1", "train.py"]) == 0
    assert "other-host" not in capsys.readouterr().out
