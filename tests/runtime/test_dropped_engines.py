"""Test engines that no script destroys: what they held is given back."""

from __future__ import annotations

import gc
import os
import threading

import zlaunch
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import join, run_workers


def _drop() -> list[tuple[int, int]]:
    rank = join()
    found = []
    for round_ in range(8):
        engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2))
        engine.backward(loss_of(engine, batches(1, 4)[0].chunk(2)[rank]))
        engine.step()
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count() + _native_threads()))
        del engine
        if round_ % 2 == rank:
            gc.collect()  # the ranks find out at different times
    return found


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_dropped_engines_keep_no_descriptors_and_threads() -> None:
    for found in run_workers(_drop, 2):
        assert max(found[2:]) <= found[1], found
