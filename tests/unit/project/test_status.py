"""Test that docs/status.md is what tests/status.py writes, and that its lists have all tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import status
from tests.status import Feature

LISTS = status.read_lists()
ALL = [feature for features in LISTS.features.values() for feature in features]
PAGE = status.TESTS.parent / "docs" / "status.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == status.page(LISTS), "python -m tests.status > docs/status.md"


@pytest.mark.parametrize("name", sorted(status.names(LISTS)))
def test_every_named_test_exists(name: str) -> None:
    assert status.files_of(name) and all(path.is_file() for path in status.files_of(name))


def test_every_test_file_stands_for_a_feature_or_the_project() -> None:
    named = {path for name in status.names(LISTS) for path in status.files_of(name)}
    missing = set(status.TESTS.rglob("test_*.py")) - named
    found = sorted(str(path.relative_to(status.TESTS)) for path in missing)
    assert not found, "name them in tests/data/features.yaml, then python -m tests.status > docs/status.md"


def test_every_feature_has_one_name_and_tests_that_count() -> None:
    assert len({feature.name for feature in ALL}) == len(ALL)
    for feature in ALL:
        assert any(status.mark(feature, column, {}) for column in status.COLUMNS), feature.name


def test_a_mark_for_a_gpu_needs_a_run_there() -> None:
    feature = Feature("one", ("gpu/test_tiles.py", "unit/zero"))
    assert status.mark(feature, "Unit test", {}) == "[✓](../tests/unit/zero)"
    assert status.mark(feature, "Three nodes, CPU", {}) == ""
    assert status.mark(feature, "GPU", {}) == "[written, never run](../tests/gpu/test_tiles.py)"
    assert "no test ever ran on a GPU" in status.page(replace(LISTS, gpu_runs={}))

    runs = {"gpu/test_tiles.py": "H100, 2027-01-01"}
    assert status.mark(feature, "GPU", runs) == "[✓](../tests/gpu/test_tiles.py) H100, 2027-01-01"
    assert "no test ever ran on a GPU" not in status.page(replace(LISTS, gpu_runs=runs))
