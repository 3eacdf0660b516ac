"""Poison the memory that stores allocate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.poison import poisoned


@pytest.fixture(autouse=True)
def _memory_is_poisoned() -> Iterator[None]:
    with poisoned():
        yield
