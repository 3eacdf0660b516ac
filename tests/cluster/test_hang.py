"""Test that a rank that hangs is named for a run on several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT
from tests.e2e.test_hang import SLEEPS, TRAIN


@pytest.mark.exhaustive
def test_the_rank_that_hangs_is_named(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(
        cluster,
        tmp_path,
        *("--no_local_rank", "--hang_timeout=30"),
        script=TRAIN,
        args=("sleeps", "3"),
        env={"PYTHONPATH": str(ROOT)},
    )
    assert launch.wait() == 1
    where = [line.strip() for line in launch.err.splitlines() if "worker.py:" in line and "| " not in line]
    assert where[0].startswith(f"rank 1 on n1 is at {SLEEPS}, with no collective in its stack"), launch.err
    assert where[0].endswith((": the others probably wait for it", ", in which others wait")), launch.err
    assert where[1].startswith("ranks 0, 2-5 wait in a collective that "), launch.err
