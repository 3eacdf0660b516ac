"""Test that what was written to a rank's log is read again, with its times and streams, however it is cut."""

from __future__ import annotations

import resource
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.supervisor.run_files import OLDER, LogReader, RankLogs, log_path, times_path
from zlaunch.system.events import STREAMS

PIECES = st.lists(st.tuples(st.sampled_from(STREAMS), st.binary(min_size=1, max_size=40)), max_size=30)


def read(reader: LogReader, most: int) -> list[tuple[str, float | None, bytes]]:
    """All that a reader has, a byte each."""
    return [
        (piece.stream, piece.time_s, piece.data[i : i + 1])
        for piece in reader.read(most)
        for i in range(len(piece.data))
    ]


@given(PIECES, st.integers(1, 50), st.sampled_from([None, 100, 400]), st.integers(0, 30), st.data())
def test_a_reader_that_follows_sees_every_byte(
    pieces: list[tuple[str, bytes]], most: int, limit: int | None, restart: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "logs").mkdir()
        logs = RankLogs(run, [3], goes_on=False, limit=limit)
        reader = LogReader(log_path(run, 3))
        found: list[tuple[str, float | None, bytes]] = []
        wanted: list[tuple[str, float | None, bytes]] = []
        for index, (stream, text) in enumerate(pieces):
            if index == restart:
                logs.close()
                logs = RankLogs(run, [3], goes_on=True, limit=limit)
                is_cut = bool(wanted) and wanted[-1][2] != b"\n"
                wanted += [(stream, float(index + 1), b"\n")] * is_cut
            logs.write(3, stream, text, float(index + 1))
            wanted += [(stream, float(index + 1), text[i : i + 1]) for i in range(len(text))]
            if limit is not None or data.draw(st.booleans()):  # it may miss what two rotations have dropped
                found += read(reader, most)
        found += read(reader, most)
        logs.close()
        assert found == wanted
        path = log_path(run, 3)
        older = path.with_name(path.name + OLDER)
        last = read(LogReader(path, older_start=0 if older.exists() else None), most)
        assert last == wanted[len(wanted) - len(last) :]
        if limit is None:
            assert len(last) == len(wanted)
            for start in range(len(wanted)):
                assert read(LogReader(path, start), most) == wanted[start:]


@pytest.mark.parametrize("free", [0, 700, 5000])
def test_a_log_that_a_full_disk_cuts_short_is_an_error_and_its_times_fit(tmp_path: Path, free: int) -> None:
    (tmp_path / "logs").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit is an OSError
    logs = RankLogs(tmp_path, [0], goes_on=False, limit=None)
    logs.write(0, "stdout", b"a" * 1000, 1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 + free, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            logs.write(0, "stderr", b"b" * 9000, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    logs.write(0, "stdout", b"c", 3.0)
    logs.close()
    pieces = [(p.data, p.stream) for p in LogReader(log_path(tmp_path, 0)).read(1 << 20)]
    wanted = [(b"a" * 1000, "stdout"), (b"b" * free, "stderr"), (b"c", "stdout")]
    assert pieces == [piece for piece in wanted if piece[0]]


def test_a_record_that_was_cut_short_puts_nothing_out_of_step(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    logs = RankLogs(tmp_path, [0], goes_on=False, limit=None)
    logs.write(0, "stdout", b"one", 1.0)
    logs.close()
    path = log_path(tmp_path, 0)
    with open(times_path(path), "ab") as file:
        file.write(b"half")
    logs = RankLogs(tmp_path, [0], goes_on=True, limit=None)
    logs.write(0, "stderr", b"two", 2.0)
    logs.close()
    pieces = [(p.data, p.stream, p.time_s) for p in LogReader(path).read(100)]
    assert pieces == [(b"one", "stdout", 1.0), (b"\ntwo", "stderr", 2.0)]
    times_path(path).unlink()
    assert [(p.data, p.time_s) for p in LogReader(path).read(100)] == [(b"one\ntwo", None)]


@pytest.mark.parametrize("limit", [None, 12])
@pytest.mark.parametrize("end", ["", "\n"])
def test_an_attempt_begins_on_a_line_of_its_own(tmp_path: Path, end: str, limit: int | None) -> None:
    (tmp_path / "logs").mkdir()
    for attempt, text in enumerate(("loss" + end, "ready\n", "done\n")):
        logs = RankLogs(tmp_path, [0, 1], goes_on=attempt > 0, limit=limit)
        logs.write(0, "stdout", text.encode(), float(attempt))
        logs.close()
    path = log_path(tmp_path, 0)
    older = path.with_name(path.name + OLDER)
    kept = older.read_text() + path.read_text() if limit else path.read_text()
    whole = "loss\nready\ndone\n"
    assert whole.endswith(kept) and kept.endswith("ready\ndone\n")
    assert log_path(tmp_path, 1).read_text() == "", "nothing is written for a rank that prints nothing"
