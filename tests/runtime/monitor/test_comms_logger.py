"""Test that the log of collectives has each of them, with a time, and changes nothing."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.comm.collectives import Comm
from zlaunch.runtime.observe.comms_logger import LoggedComm, log_summary, newest_log

OVER = {"shared memory": {}, "gloo": {"ZLAUNCH_SHARED_MEMORY": "0"}}


def _train(stage: int, **options: Any) -> tuple[Any, list[float]]:
    engine, *_ = zlaunch.initialize(model=net(width=48), config=config(stage, 2, 2, **options))
    return engine, train_engine(engine, batches(4, 8))


def _table(stage: int) -> dict[str, Any]:
    """Train with and without a log, and return both, with what the communicator itself has counted."""
    join()
    plain, plain_losses = _train(stage)
    assert type(plain.comm) is Comm and newest_log() is None
    plain.destroy()
    found: dict[str, Any] = {"scalars": 0}
    close, add = LoggedComm.close, Comm.all_reduce_scalars

    def look_and_close(self: LoggedComm) -> None:
        self.log.poll()
        found["rows"] = [(*key[:2], row.count, row.timed, row.seconds) for key, row in self.log.rows.items()]
        found.update(moved=self.moved, calls=self.calls, shared=self.shared)
        close(self)

    def count_and_add(self: Comm, tensor: Tensor, *more: Any) -> Tensor:
        found["scalars"] += tensor.nbytes
        return add(self, tensor, *more)

    # in this process, which ends with the test
    LoggedComm.close = look_and_close  # type: ignore[method-assign]
    Comm.all_reduce_scalars = count_and_add  # type: ignore[method-assign, assignment]
    engine, losses = _train(stage, comms_logger={"enabled": True})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine.destroy()
    assert newest_log() is None
    pairs = zip(engine.module.parameters(), plain.module.parameters(), strict=True)
    same = losses == plain_losses and all(torch.equal(one, other) for one, other in pairs)
    return {**found, "same": same, "printed": printed.getvalue()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_collective_is_in_the_table(stage: int, over: str) -> None:
    results = run_workers(_table, 2, stage, env=OVER[over])
    for found in results:
        assert found["same"] and found["shared"] == (over == "shared memory")
        counts, nbytes = Counter[str](), Counter[str]()
        for kind, size, count, timed, seconds in found["rows"]:
            counts[kind] += count
            nbytes[kind] += size * count
            assert timed == count and seconds > 0
        calls, moved = found["calls"], found["moved"]
        calls["all_reduce"] += calls.pop("scalars")
        assert counts == calls
        assert nbytes["all_reduce"] - found["scalars"] == moved["all_reduce"] // 2 * 4  # each counts twice
        assert nbytes["all_gather"] == moved["all_gather"] * 4
        assert nbytes["reduce_scatter"] == moved["reduce_scatter"] * 4
        assert moved["broadcast"] * 4 <= nbytes["broadcast"] <= moved["broadcast"] * 8  # int64 among them
    lines = results[0]["printed"].splitlines()
    assert lines[0] == "zlaunch: collectives of engine 1, timed on rank 0"
    assert len(lines) == 2 + len(results[0]["rows"])
    assert not results[1]["printed"]


def _stragglers() -> str:
    """Only operations that were asked for; a table while the log goes on; an engine that is dropped."""
    rank = join()
    section = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"], "verbose": True}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, _ = _train(2, comms_logger=section)
        log_summary(show_straggler=True)
        print("--")
        del engine, _
        gc.collect()
    assert newest_log() is None
    return printed.getvalue() if rank == 0 else ""


def test_only_what_was_asked_for_is_logged() -> None:
    said = run_workers(_stragglers, 2)[0]
    each, _, rest = said.partition("zlaunch: collectives")
    assert set(re.findall(r"^zlaunch: (\w+) of \S+ \wi?B, 2 ranks: [\d.]+ ms", each, re.M)) == {
        "reduce_scatter"
    }
    assert "layers.0" in each
    first, _, last = rest.partition("--\n")
    assert "wait ms" in first and "wait ms" not in last
    for table in (first, last):
        assert set(re.findall(r"^  (\w+) +[\d.]+ [KB]", table, re.M)) == {"reduce_scatter"}


def _of_optimizers(kind: str) -> tuple[dict[str, int], int]:
    """The bytes of each kind of collective, and those of signs that the communicator has counted."""
    join()
    params = {"lr": 1e-3} if kind == "Muon" else {"lr": 1e-3, "freeze_step": 1}
    engine, _ = _train(0, comms_logger={"enabled": True}, optimizer={"type": kind, "params": params})
    comm = engine.comm
    comm.log.poll()
    found = Counter[str]()
    for key, row in comm.log.rows.items():
        assert row.timed == row.count
        found[key[0]] += key[1] * row.count
    with contextlib.redirect_stdout(io.StringIO()):
        engine.destroy()
    return dict(found), comm.moved["bytes of signs"]


@pytest.mark.parametrize("over", OVER)
def test_what_optimizers_exchange_is_in_the_table(over: str) -> None:
    for found, signs in run_workers(_of_optimizers, 2, "OneBitAdam", env=OVER[over]):
        assert found["all_to_all"] + found["all_gather"] == signs > 0
    for found, _ in run_workers(_of_optimizers, 2, "Muon", env=OVER[over]):
        assert found["all_to_all"] > 0
