"""Test `zlaunch doctor` on a cluster over ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S
from zlaunch.cli.doctor import _meet
from zlaunch.supervisor.nodes import close_all, connect
from zlaunch.system.processes import python_module_argv
from zlaunch.transports.local import LocalTransport


def doctor(cluster: Any, folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    config = getattr(cluster, "ssh_config", None)
    ssh = [] if config is None else [f"--ssh_config={config}"]
    return subprocess.run(
        [sys.executable, "-m", "zlaunch", "doctor", *ssh, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_good_cluster(cluster: Any, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, "--hostfile", cluster.hostfile)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    for host in cluster.hosts:
        assert " error " not in rows[host] and "by " in rows[host]


def test_json(cluster: Any, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, "--hostfile", cluster.hostfile, "--json")
    data = json.loads(done.stdout)
    assert data["ok"] is True and done.returncode == 0
    assert [host["host"] for host in data["hosts"]] == list(cluster.hosts)
    for host in data["hosts"]:
        assert host["torch"] and host["zlaunch"] and abs(host["skew_s"]) < 1
        assert host["meets_by"] in host["addresses"]


@pytest.mark.rotated
def test_a_host_that_is_not_there_leaves_the_others_shown(cluster: Any, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("no-such-host slots=2\n" + cluster.hostfile.read_text())
    done = doctor(cluster, tmp_path, "--hostfile", hostfile)
    assert done.returncode == 1 and done.stderr == ""
    assert "error no-such-host: no such host" in done.stdout
    data = json.loads(doctor(cluster, tmp_path, "--hostfile", hostfile, "--json").stdout)
    assert data["ok"] is False
    assert [host["host"] for host in data["hosts"] if host["python"]] == list(cluster.hosts)


@pytest.mark.exhaustive
def test_no_python_there_and_no_such_interface(cluster: Any, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, "--hostfile", cluster.hostfile, "--venv", "/nowhere")
    assert done.returncode == 1 and done.stdout.count("there is no such Python") == len(cluster.hosts)
    wrong = doctor(cluster, tmp_path, "--hostfile", cluster.hostfile, "--iface", "eth77")
    assert wrong.returncode == 1 and wrong.stdout.count("--iface eth77") == len(cluster.hosts)


def test_all_that_cannot_reach_node_0_are_named(cluster: Any, tmp_path: Path) -> None:
    """Agents of this machine, two of them cut off in network namespaces of their own."""

    def open_transport(host: str) -> LocalTransport:
        alone = ("unshare", "--net") if host in ("b", "d") else ()
        argv = (*alone, *python_module_argv("zlaunch.node.agent"))
        return LocalTransport(host, argv, tmp_path / f"{host}.err")

    nodes, errors = connect(["a", "b", "c", "d", "e"], open_transport, 30.0)
    try:
        assert not errors
        interfaces, unreached = _meet(nodes, None)
    finally:
        close_all(nodes)
    assert set(unreached) == {"b", "d"} and all("cannot reach a" in text for text in unreached.values())
    assert set(interfaces) == {"a", "c", "e"} and "" not in interfaces.values()
