"""Test what the other tests rely on: ranks that hang are ended, and show where they stood."""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.limits import FOR_EVER_S, wait_until
from tests.runtime.workers import WorkerError, run_workers


def _rank_one_sleeps(raises: bool) -> int:
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


def _says_its_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    _sleep_deeply()


def test_no_rank_outlives_an_interrupted_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the test's own limit raises in the middle of the wait."""

    wait = multiprocessing.connection.wait

    def interrupted(objects: Any, timeout: float | None = None) -> Any:
        if timeout == 0:  # multiprocessing itself asks which processes have ended
            return wait(objects, 0)
        monkeypatch.setattr(multiprocessing.connection, "wait", wait)  # the ranks are joined with it
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.connection, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_workers(_says_its_pid, 2, str(tmp_path))
    assert not [path.name for path in tmp_path.iterdir() if Path("/proc", path.name).exists()]


def test_ranks_have_the_environment_of_their_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLAUNCH_TEST_WORD", "first")
    assert run_workers(_word, 1) == ["first"]
    monkeypatch.delenv("ZLAUNCH_TEST_WORD")
    assert run_workers(_word, 1) == [None]


def _word() -> str | None:
    return os.environ.get("ZLAUNCH_TEST_WORD")


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_workers(_own_rank, 2, 10) == [10, 11]


def _own_rank(first: int) -> int:
    return first + int(os.environ["RANK"])
