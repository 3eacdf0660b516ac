"""Test that workers' output arrives byte for byte through whatever starts the agents."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch

SCRIPT = """
    import os, random, sys
    rank = int(os.environ["RANK"])
    sys.stdout.buffer.write(random.Random(rank).randbytes(1_000_000))
    sys.stdout.buffer.flush()
    for number in range(500):
        os.write(1, b"%d\\r" % number)
    os.write(1, b"no newline")
"""
BARS = b"".join(b"%d\r" % number for number in range(500)) + b"no newline"


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "by", ["ssh", "slurm", pytest.param("openmpi", marks=pytest.mark.needs("mpirun.openmpi"))]
)
def test_every_byte_arrives(cluster: Testbed, tmp_path: Path, by: str) -> None:
    if by == "openmpi":
        agent = {
            "OMPI_MCA_plm_rsh_agent": f"ssh -F {cluster.ssh_config}",
            "OMPI_MCA_oob_tcp_if_include": "10.79.0.0/24",
        }
        options = (f"--hostfile={cluster.hostfile}", "--launcher=openmpi", "--no_local_rank")
        launch = Launch(tmp_path, *options, script=SCRIPT, env=agent)
    else:
        launch = start(cluster, tmp_path, by=by, script=SCRIPT)
    assert launch.wait() == 0, launch.err
    for rank in range(6):
        assert launch.log_bytes(rank) == random.Random(rank).randbytes(1_000_000) + BARS
