"""Test bandwidths and the table of the log of collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zlaunch.runtime.config import ConfigError, load
from zlaunch.runtime.config.schema import OPERATIONS
from zlaunch.runtime.observe import comms_logger
from zlaunch.runtime.observe.comms_logger import CommRow, CommsLogger, bus_share, table


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("all_reduce", (1.0, 1.5, 1.75)),
        *((kind, (0.5, 0.75, 0.875)) for kind in ("all_gather", "reduce_scatter", "all_to_all", "gather")),
        *((kind, (1.0, 1.0, 1.0)) for kind in ("broadcast", "reduce", "send", "recv", "barrier")),
    ],
)
def test_the_bandwidth_of_a_link_is_that_of_nccl_tests(kind: str, shares: tuple[float, ...]) -> None:
    assert tuple(bus_share(kind, ranks) for ranks in (2, 4, 8)) == shares


def test_the_table_has_every_number() -> None:
    rows = {
        ("all_reduce", 3_000_000, 4, ""): CommRow(count=3, timed=2, seconds=0.004),
        ("barrier", 0, 2, ""): CommRow(count=1, timed=1, seconds=0.001),
        ("all_gather", 2048, 4, ""): CommRow(count=1),
    }
    title, head, gather, reduced, barrier, note = table(rows, 2)
    assert title == "zlaunch: collectives of engine 2, timed on rank 0"
    assert head.split()[:5] == ["operation", "size", "ranks", "count", "total"]
    assert gather.split() == ["all_gather", "2.00", "KiB", "4", "1", "0.00", "-", "-", "-"]
    assert reduced.split() == ["all_reduce", "2.86", "MiB", "4", "3", "4.00", "2.000", "1.5", "2.25"]
    assert barrier.split() == ["barrier", "0", "B", "2", "1", "1.00", "1.000", "-", "-"]
    assert note.startswith("  2 operations are untimed")
    assert len({len(line) for line in (head, gather, reduced, barrier)}) == 1
    stragglers = table(rows, 2, {("all_reduce", 3_000_000, 4, ""): 0.001})
    assert stragglers[1].endswith("wait ms") and stragglers[3].endswith(" 3.00")
    assert stragglers[4].endswith(" -")
    assert table({}) == ["zlaunch: comms_logger: no operations logged"]


def make(**keys: object) -> CommsLogger:
    section = load({"train_batch_size": 1, "comms_logger": {"enabled": True, **keys}}).config.comms_logger
    return CommsLogger(section, prints=True)


@pytest.fixture(autouse=True)
def _no_logs_stay() -> Iterator[None]:
    yield
    comms_logger._loggers.clear()


def test_names_of_functions_are_operations() -> None:
    log = make(prof_all=False, prof_ops=["allgather_fn", "reduce_scatter_tensor", "isend"])
    assert {kind for kind in OPERATIONS.values() if log.wants(kind)} == {
        "all_gather",
        "reduce_scatter",
        "send",
    }
    assert not any(map(make(prof_all=False).wants, OPERATIONS))
    assert all(map(make(prof_ops=["barrier"]).wants, OPERATIONS.values()))
    with pytest.raises(ConfigError, match=r"prof_ops.0: .* expected one of all_gather, all_gather_coalesced"):
        make(prof_ops=["allgather"])


def test_operations_are_said_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    log = make(verbose=True, debug=True)
    with log.timing("broadcast", 4096, 2, on_gpu=False, label="layers.0"):
        pass
    log.end(log.begin("barrier", 0, 2), 0.5)
    log.poll()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("zlaunch: broadcast of 4.00 KiB, 2 ranks: ") and " GB/s, bus " in first
    place = f"{__name__}.test_operations_are_said_where_they_are_asked_for:"
    assert f", layers.0, {place}" in first
    assert second.startswith(f"zlaunch: barrier of 0 B, 2 ranks: 500.000 ms, {place}")
    assert {key[3].rpartition(":")[0] + ":" for key in log.rows} == {place}
    assert comms_logger.count_operations() == 2
    comms_logger.log_summary()
    assert place in capsys.readouterr().out
    late = log.begin("barrier", 0, 2)
    comms_logger.reset_log()
    log.end(late, 1.0)  # the row is gone
    log.finish(wait=False)
    log.finish(wait=False)
    assert capsys.readouterr().out == "zlaunch: comms_logger: no operations logged\n"
    comms_logger.log_summary()
    assert "warning: log_summary: nothing is logged: set" in capsys.readouterr().out
