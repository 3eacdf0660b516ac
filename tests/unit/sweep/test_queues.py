"""Test that a sweep asks the queue once for all of its trials."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.queue.test_store import submission
from zlaunch.cli.submit import prepare_launcher
from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import queue_folder, take_lock
from zlaunch.queue.store import Store
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.end import End
from zlaunch.sweep.queues import LocalQueue


def test_a_look_costs_the_same_however_many_trials_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, store = tmp_path / "sweep", Store(queue_folder())
    trials = [folder / f"{number:03d}" for number in range(20)]
    for path in trials:
        path.mkdir(parents=True)
        run_folder.queued(str(path), path.name, ["localhost"], 1, ["x.py"])
        store.add(submission(run_dir=str(path)), {})
    lock = take_lock(queue_folder())  # nobody starts a daemon
    assert lock is not None
    opened = []
    once = Store._open

    @contextmanager
    def noted(store: Store) -> Iterator[sqlite3.Connection]:
        opened.append(store)
        with once(store) as base:
            yield base

    queue = LocalQueue(folder, prepare_launcher)
    monkeypatch.setattr(Store, "_open", noted)
    queue.look()
    assert [queue.standing(path) for path in trials] == ["queued"] * 20
    assert len(opened) < 5
    first = store.jobs("waiting")[0]
    assert store.end(first, End(7, "failed"), "")
    queue.look()
    assert [queue.standing(path) for path in trials[:2]] == ["ended 7", "queued"]
    with once(store) as base:
        base.execute("DELETE FROM jobs WHERE id = ?", (first.id,))  # the queue forgets old ends
    run_folder.left_queue(trials[0], End(7, "failed"))
    queue.look()
    assert queue.standing(trials[0]) == "ended 7" and queue.standing(folder / "none") == "new"
    os.close(lock)


def test_a_trial_whose_folder_was_removed_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "sweep"
    store = Store(queue_folder())
    trial = folder / "001"
    trial.mkdir(parents=True)
    run_folder.queued(str(trial), "001", ["localhost"], 1, ["x.py"])
    number = store.add(submission(run_dir=str(trial)), {})
    lock = take_lock(queue_folder())  # nobody starts a daemon
    assert lock is not None
    LocalQueue(folder, prepare_launcher).find()
    shutil.rmtree(trial)
    with pytest.raises(LaunchError, match=f"001 was removed, .* first `zlaunch cancel {number}`"):
        LocalQueue(folder, prepare_launcher).find()  # it would run beside the new one
    [job] = store.jobs("waiting")
    assert store.end(job, End(7, "failed"), "")
    queue = LocalQueue(folder, prepare_launcher)
    queue.find()
    assert queue.standing(trial) == "new"
    trial.mkdir()
    assert queue.standing(trial) == "new"
    os.close(lock)
