"""Skip tests that need what this machine does not have: ``@pytest.mark.needs(NAME, ...)``.

The names are those of the table in `tests/programs.py`. CI turns skips into failures (``--no-skips``).
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.programs import FIXTURES, NEEDS, missing


def needs_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of what a test needs, by its marks and its fixtures."""
    by_marks = [name for mark in item.iter_markers("needs") for name in mark.args]
    fixtures = getattr(item, "fixturenames", ())
    by_fixtures = [name for fixture in fixtures for name in FIXTURES.get(fixture, ())]
    return (*by_marks, *by_fixtures)


def needs_package(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips where a Python package is not installed.

    It looks without importing: `pytest.importorskip` would import the package in every process that collects.
    """
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install {name}")


class Needs:
    """The plugin that skips."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line(
            "markers", "needs(name, ...): names of tests/programs.py, without which it is skipped"
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse a name that the table does not have."""
        unknown = {(name, item.nodeid) for item in items for name in needs_of(item) if name not in NEEDS}
        if unknown:
            raise pytest.UsageError(f"not in the table of tests/programs.py: {sorted(unknown)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if reason := missing(needs_of(item)):
            pytest.skip(f"this machine lacks {reason}")
