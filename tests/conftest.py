"""How the tests are spread over the processes of pytest-xdist (``pytest -n 2``)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_ALONE = ("tests/cluster/", "tests/runtime/")
"""There is one cluster; and ranks that wait for each other in shared memory should have a core each."""


class _Scheduling(LoadScopeScheduling):
    """One process for each of these folders at a time, the other tests file by file."""

    def _split_scope(self, nodeid: str) -> str:
        folder = next((name for name in _ALONE if nodeid.startswith(name)), None)
        return folder or nodeid.partition("::")[0]


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)
