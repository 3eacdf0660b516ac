"""Test that a debugger reaches a rank on another host, on the address that ssh uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.dap_client import DapClient
from tests.limits import wait_until

pytest.importorskip("debugpy")


@pytest.mark.exhaustive
def test_a_client_attaches_to_a_rank_on_another_host(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os
        print("ran", os.environ["RANK"])
    """
    launch = start(cluster, tmp_path, "--debug=2", script=script)
    (said,) = wait_until(lambda: launch.events("debugger"), lambda: f"rank 2 waits: {launch.err}")
    assert (said["rank"], said["host"], said["address"]) == (2, "n2", cluster.address("n2"))
    wait_until(lambda: "launch.json" in launch.err, "the advice is shown")
    assert "warning: anyone who reaches this port can run code as you" in launch.err
    client = DapClient(said["address"], said["port"])
    client.attach({"host": said["address"], "port": said["port"]}, {})
    client.wait_for("terminated")
    client.close()
    assert launch.wait() == 0, launch.err
    assert launch.log(2) == "ran 2\n"
