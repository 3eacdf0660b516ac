"""Provide one cluster for all tests of this folder; see CLUSTER in tests/programs.py for what it needs."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.testbed import Testbed
from tests.conftest import FAILED
from tests.leftovers import ended_afterwards
from tests.limits import wait_until


@pytest.fixture(scope="session")
def _testbed() -> Iterator[Testbed]:
    with (
        open(Path(tempfile.gettempdir(), "ztest-bed.lock"), "w") as lock,
        tempfile.TemporaryDirectory(prefix="ztest-") as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # its networks have names that are a machine's
        bed = Testbed(Path(folder) / "bed")
        try:
            bed.up()
            yield bed
        finally:
            bed.down()


@pytest.fixture
def cluster(_testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """Three nodes by ssh and SLURM: a test that passes has left nothing there, after others all is ended."""
    with ended_afterwards():
        yield _testbed
        passed = not request.node.stash.get(FAILED, True)
        if passed:
            wait_until(lambda: not _testbed.processes(), lambda: f"nodes empty, not {_testbed.processes()}")
    try:
        _testbed.cancel_jobs()
        _testbed.kill_processes()
    except AssertionError:
        _testbed.down()
        _testbed.up()
        raise
