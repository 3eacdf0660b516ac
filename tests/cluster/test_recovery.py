"""Test runs that lose workers and nodes, and go on from the memory of those that are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import pid_of
from tests.cluster.recovery import begins, losses, plain, straight, train
from tests.cluster.testbed import Testbed
from tests.limits import wait_until


@pytest.mark.exhaustive  # tests/e2e/test_in_memory.py has a shorter one, on one machine
def test_a_killed_worker(cluster: Testbed, tmp_path: Path) -> None:
    launch = train(cluster, tmp_path / "killed", "--max_restarts=1")
    wait_until(lambda: 18 in losses(launch), "step 18")
    host, pid = pid_of(launch, 1)
    cluster.enter(host, "kill", "-KILL", str(pid))
    assert launch.wait() == 0, launch.err
    first, second = begins(launch)
    assert first == (0, 3) and second[0] >= 10
    assert losses(launch) == straight(cluster, tmp_path / "straight")
    for node in cluster.hosts:
        assert "zlaunch-memory" not in cluster.enter(node, "ls", "/dev/shm").stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", ["n1", pytest.param("n2", marks=pytest.mark.exhaustive)])
def test_a_spare_takes_the_place_of_a_node_that_is_cut_off(
    cluster: Testbed, tmp_path: Path, lost: str
) -> None:
    launch = train(cluster, tmp_path / "cut", "--spares=1")
    wait_until(lambda: 18 in losses(launch), "step 18")
    ready = lambda: "zlaunch.node.preload" in str(cluster.processes("n3"))  # noqa: E731
    wait_until(ready, lambda: f"the spare has everything imported: {cluster.processes('n3')}")
    if lost == "n2":
        cluster.enter("n3", "pkill", "-KILL", "-f", "zlaunch")  # it is begun anew when it is needed
    cluster.cut(lost)
    try:
        assert launch.wait() == 0, launch.err
    finally:
        cluster.heal(lost)
    assert f"n3 takes the place of {lost}" in launch.err
    first, second = begins(launch)
    assert first == (0, 2) and second[1] == 2 and second[0] >= 10
    assert losses(launch) == straight(cluster, tmp_path / "straight", "--num_nodes=2")


@pytest.mark.exhaustive
def test_a_node_goes_and_comes_back(cluster: Testbed, tmp_path: Path) -> None:
    launch = train(cluster, tmp_path / "rebooted", "--min_nodes=2", last=1 << 30, last_attempt="2")
    wait_until(lambda: 18 in losses(launch), "step 18")
    cluster.reboot("n2")
    assert launch.wait() == 0, launch.err
    assert "going on with 2 of 3 nodes, without n2" in launch.err
    assert "going on with 3 of 3 nodes" in launch.err
    assert [world for _, world in begins(launch)] == [3, 2, 3]
    assert all(step >= 10 for step, _ in begins(launch)[1:])
    found = losses(launch)
    assert found == pytest.approx(plain(max(found)), rel=1e-3, abs=1e-4)
