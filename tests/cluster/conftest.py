"""One cluster for all tests of this folder; where there can be none they are skipped, with the reason."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.testbed import Testbed, missing


@pytest.fixture(scope="session")
def _testbed() -> Iterator[Testbed]:
    if reason := missing():
        pytest.skip(f"no cluster: {reason}")
    with tempfile.TemporaryDirectory(prefix="ztest-") as folder:
        bed = Testbed(Path(folder) / "bed")
        try:
            bed.up()
            yield bed
        finally:
            bed.down()


@pytest.fixture
def cluster(_testbed: Testbed) -> Iterator[Testbed]:
    """Three nodes by ssh and SLURM; after each test nothing of it may be alive on any."""
    yield _testbed
    left = _testbed.processes()
    if left:
        _testbed.down()
        _testbed.up()
    assert not left, f"left on the nodes: {left}"
