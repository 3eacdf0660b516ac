"""Test what the other tests rely on: ranks that hang are ended, and show where they stood."""

from __future__ import annotations

import re
import time

import pytest

from tests.limits import FOR_EVER_S
from tests.runtime.workers import WorkerError, run_workers


def _rank_one_sleeps(raises: bool) -> int:
    import os

    if os.environ["RANK"] == "1":
        _sleep_deeply()
    if raises:
        raise ValueError("rank 0 has its own error")
    return 7


def _sleep_deeply() -> None:
    time.sleep(FOR_EVER_S)


@pytest.mark.parametrize(
    ("raises", "message"), [(False, r"ranks \[1\] had to be killed"), (True, "rank 0 has its own error")]
)
def test_a_hanging_rank_is_killed_and_shows_its_stack(raises: bool, message: str) -> None:
    """The first limits may be too short for the ranks to get as far as that on a busy machine."""
    for limit_s in (3.0, 10.0, 30.0, 100.0):
        with pytest.raises(WorkerError) as caught:
            run_workers(_rank_one_sleeps, 2, raises, limit_s=limit_s)
        if "_sleep_deeply" in str(caught.value):
            break
    assert re.search(rf"(?s){message}.*rank 1 stood at.*_sleep_deeply", str(caught.value))


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_workers(_own_rank, 2, 10) == [10, 11]


def _own_rank(first: int) -> int:
    import os

    return first + int(os.environ["RANK"])
