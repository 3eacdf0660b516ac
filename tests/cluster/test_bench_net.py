"""Test `zlaunch bench net` between real nodes, over ssh and in a SLURM job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S


def bench_net(
    folder: Path, *arguments: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run it to its end and return what it has measured; it leaves nothing behind."""
    own = folder / "tmp"
    own.mkdir()
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "zlaunch", "bench", "net", "--json", "--size", "4", *arguments],
        cwd=folder,
        env={**os.environ, **(env or {}), "PYTHONPATH": str(ROOT), "TMPDIR": str(own)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(own.glob("zlaunch-bench-net-*")) and not (folder / "runs").exists()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.exhaustive
def test_a_node_that_answers_late_is_named(cluster: Testbed, tmp_path: Path) -> None:
    with cluster.latency("n2", 25):
        found = bench_net(
            tmp_path, f"--hostfile={cluster.hostfile}", f"--ssh_config={cluster.ssh_config}", "--num_gpus=2"
        )
    assert [node["name"] for node in found["nodes"]] == list(cluster.hosts)
    assert [node["ranks"] for node in found["nodes"]] == [[0, 1], [2, 3], [4, 5]]
    measured = {(speed["scope"], tuple(speed["ranks"]), speed["op"]) for speed in found["collectives"]}
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    groups: list[tuple[str, tuple[int, ...]]]
    groups = [("node", (0, 1)), ("node", (2, 3)), ("node", (4, 5))]
    groups += [("nodes", (0, 2, 4)), ("world", (0, 1, 2, 3, 4, 5))]
    assert measured == {(*group, op) for group in groups for op in ops}
    assert len(found["links"]) == 6
    for link in found["links"]:
        assert (link["latency_s"] > 0.02) == ("n2" in (link["source"], link["target"])), found["links"]
    assert any(text.startswith("n2 has high latency: ") for text in found["slow"]), found["slow"]


@pytest.mark.exhaustive
def test_in_a_slurm_job(cluster: Testbed, tmp_path: Path) -> None:
    prefix = ("salloc", "--quiet", "-N2", f"--gres=gpu:{cluster.slots}")
    found = bench_net(tmp_path, "--num_gpus=1", prefix=prefix, env=cluster.env())
    assert [node["ranks"] for node in found["nodes"]] == [[0], [1]] and len(found["links"]) == 2
    assert {speed["scope"] for speed in found["collectives"]} == {"nodes"}


@pytest.mark.exhaustive
def test_in_the_tasks_of_a_step(cluster: Testbed, tmp_path: Path) -> None:
    prefix = ("srun", "--quiet", "-N2", "--ntasks-per-node=1", f"--gres=gpu:{cluster.slots}")
    found = bench_net(tmp_path, "--num_gpus=1", prefix=prefix, env=cluster.env())
    assert sorted(node["name"] for node in found["nodes"]) == ["n1", "n2"]
    assert {(link["source"], link["target"]) for link in found["links"]} == {("n1", "n2"), ("n2", "n1")}
