"""Test runs on a cluster with a node that is not healthy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed

SCRIPT = "import os; print('env', os.environ['ZLAUNCH_WORLD_SIZES'], os.environ['WORLD_SIZE'])"


@pytest.mark.rotated
def test_a_node_with_a_full_disk_is_left_out(cluster: Testbed, tmp_path: Path) -> None:
    full = tmp_path / "work"
    full.mkdir()
    cluster.enter("n2", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full))
    try:
        script = (tmp_path / "worker.py").absolute()
        options = ("--exclude_unhealthy", "--min_nodes=2", f"--workdir={full}")
        script.write_text(SCRIPT)
        launch = start(cluster, tmp_path, *options, str(script))
        assert launch.wait() == 0, launch.err
    finally:
        cluster.enter("n2", "umount", str(full))
    assert f"n2: it is not healthy: 1 MiB free in {full}: make room" in launch.err
    assert "going on with 2 of 3 nodes, without n2" in launch.err
    assert "health of n3: " in launch.err and "env 6 4 4" in launch.log(3)
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    assert record["cause"] == "finished"
