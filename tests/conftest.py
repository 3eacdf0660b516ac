"""How the tests are spread over the processes of pytest-xdist (``pytest -n 2``)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class _Scheduling(LoadScopeScheduling):
    """Every test by itself, those of the cluster in one process: there is one cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/cluster" if nodeid.startswith("tests/cluster/") else nodeid


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)
