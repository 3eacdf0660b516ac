"""Test that a worker is dead before its successor on another node begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.split_brain import HOWS, both_s
from tests.cluster.testbed import Testbed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", HOWS)
def test_there_are_never_two_rank_0s(cluster: Testbed, tmp_path: Path, how: str) -> None:
    both, _ = both_s(cluster, tmp_path / "run", how, wait_s=0.5)
    assert both == 0.0
