"""Test that killed and resumed runs train on every sample once. ``python -m tests.drills data`` does many."""

from __future__ import annotations

import pytest

from tests.data_drills import data


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(8))
def test_every_sample_is_trained_on_once_whatever_is_killed(number: int) -> None:
    data(7, number)
