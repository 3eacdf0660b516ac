"""Test which parts of a run's folder go into an archive for an issue, and how it is written."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.supervisor.bundle import check_target, choose_logs, failure_report, pack, write
from zlaunch.supervisor.redact import (
    FIRST_METRICS,
    HEAD_BYTES,
    LAST_METRICS,
    TAIL_BYTES,
    as_bytes,
    open_inside,
    read_ends,
    read_events,
    read_whole,
)

SECRET = "verysecretvalue"


def lines_of(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def test_the_ends_of_a_log(tmp_path: Path) -> None:
    data = lines_of(*(f"line {number}" for number in range(20_000)))
    (tmp_path / "log").write_bytes(data)
    part = read_ends(tmp_path, "log", ())
    head, _, tail = part.text.partition("\n[zlaunch bundle: ")
    note, _, tail = tail.partition(" bytes left out here]\n")
    assert (
        data.startswith(head.encode() + b"\n") and data.endswith(tail.encode()) and tail.startswith("line ")
    )
    assert int(note) == part.left_out == len(data) - len(head) - 1 - len(tail)
    assert HEAD_BYTES - 20 < len(head) <= HEAD_BYTES and TAIL_BYTES - 20 < len(tail) <= TAIL_BYTES


def test_the_ends_of_a_log_that_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\n" + b"\xc3\xa9" * 10**5 + b"\nlast\n")
    part = read_ends(tmp_path, "log", ())
    head, _, tail = as_bytes(part.text).partition(b"\n[zlaunch bundle: ")
    assert len(head) == HEAD_BYTES and tail.endswith(b"\nlast\n") and len(tail) > TAIL_BYTES
    assert not part.secrets and part.left_out == 200_012 - HEAD_BYTES - TAIL_BYTES


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES + TAIL_BYTES])
def test_a_short_log_is_there_as_a_whole(tmp_path: Path, size: int) -> None:
    data = bytes(255 - number % 256 for number in range(size))
    (tmp_path / "log").write_bytes(data)
    part = read_ends(tmp_path, "log", ())
    assert as_bytes(part.text) == data and (part.size, part.left_out) == (size, 0)


@pytest.mark.parametrize("filler", ["x", "x\n"])
def test_no_half_of_a_secret_is_left_at_a_cut(tmp_path: Path, filler: str) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "QUJD\n" * 400 + "-----END PRIVATE KEY-----\n"
    for secret in (SECRET, key):
        for place in (HEAD_BYTES - len(secret) // 2, 150_000 - TAIL_BYTES - len(secret) // 2):
            text = (filler * 150_000)[:place] + secret
            text += (filler * 150_000)[: 150_000 - len(text)]
            (tmp_path / "log").write_text(text)
            part = read_ends(tmp_path, "log", (SECRET,))
            assert part.secrets == part.text.count("(not shown)") and (part.secrets == 1 or filler != "x")
            assert not [piece for piece in ("verys", "value", "QUJD", "KEY") if piece in part.text]


def test_events_without_most_metrics(tmp_path: Path) -> None:
    metrics = [{"type": "metrics", "rank": 0, "step": step} for step in range(1000)]
    others: list[dict[str, object]] = [{"type": "exit", "returncode": 3, "why": SECRET}, {"type": "notice"}]
    everything = [others[0], {"type": "pong"}, *metrics[:300], {"type": "output"}, others[1], *metrics[300:]]
    data = lines_of(*(json.dumps(event, separators=(",", ":")) for event in everything), "scribble token=abc")
    (tmp_path / "events.jsonl").write_bytes(
        data + b"x" * (3 << 20) + b"\n" + b'{"type":"exit","why":"verysec'
    )
    known = read_events(tmp_path, "events.jsonl", (SECRET,))
    *found, last = known.excerpt.text.splitlines()
    assert last == "scribble token=(not shown)"
    assert [json.loads(line) for line in found] == [
        {**others[0], "why": "(not shown)"},
        *metrics[:FIRST_METRICS],
        others[1],
        *metrics[-LAST_METRICS:],
    ]
    assert known.events == others and known.excerpt.secrets == 2
    assert known.excerpt.left_out == 1000 - FIRST_METRICS - LAST_METRICS + 1


def test_only_plain_files_of_the_folder_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (folder / "inside").write_text("inside")
    os.mkfifo(folder / "fifo")
    for name, target in (("out", "../outside"), ("in", "inside"), ("circle", "circle"), ("gone", "nothing")):
        (folder / name).symlink_to(target)
    (tmp_path / "link").symlink_to(folder)
    for name in ("out", "circle", "gone", "fifo", "logs", "../outside"):
        with pytest.raises(OSError):
            open_inside(folder, name)
    for place in (folder, tmp_path / "link"):
        with open_inside(place, "in") as file:
            assert file.read() == b"inside"


def test_a_broken_or_huge_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"api_key": "abc", \xff')
    assert read_whole(tmp_path, "plan.json", ()).text == '{"api_key": "(not shown)", \udcff\n'
    os.truncate(tmp_path / "plan.json", 1 << 30)
    with pytest.raises(OSError, match="too much"):
        read_whole(tmp_path, "plan.json", ())


def test_whose_logs_are_taken() -> None:
    assert choose_logs(range(5), []) == [0, 1, 2, 3, 4]
    assert choose_logs(range(100), [50, 200], most=6) == [0, 1, 2, 50, 98, 99]
    assert choose_logs(range(100), list(range(20, 60)), most=4) == [0, 20, 21, 22]
    assert choose_logs(["a", "b", "c"], ["c"], most=2) == ["a", "c"]
    assert choose_logs([], []) == []


def test_what_went_wrong_is_told_in_order() -> None:
    told = failure_report(
        [
            {"type": "start", "attempt": 0, "hosts": ["h"], "time": 0},
            {"type": "metrics", "loss": 1},
            {
                "type": "exception",
                "rank": 1,
                "host": "h",
                "exception": "ValueError: x",
                "traceback": "a\nb\n",
            },
            {"type": "exit", "rank": 1, "host": "h", "returncode": 1, "reason": "why"},
            {"type": "exit", "rank": 0, "host": "h", "returncode": -15, "after_stop": True, "time": "x"},
            {"type": "exit", "rank": 2, "host": "h", "returncode": 0},
            {"type": "error", "host": "h", "message": "m"},
            {"type": "lost", "host": "h", "why": "fell silent"},
            {"type": "exit"},
        ]
    )
    assert told.splitlines() == [
        "1970-01-01 00:00:00 UTC  attempt 0 on ['h']",
        "rank 1 on h: exception: ValueError: x",
        "    a",
        "    b",
        "rank 1 on h: exit code 1, likely reason: why",
        "rank 0 on h: killed by SIGTERM after it was told to stop",
        "h: error: m",
        "h: lost: it fell silent",
        "rank None on None: exit code None",
        "ranks that exited with code 0: 1",
    ]


def test_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    old = os.umask(0)
    try:
        write(path, pack("folder", {"a": b"1", "logs/b": b""}))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["a.tar.gz"]
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        assert archive.getnames() == ["folder/a", "folder/logs/b"]
        assert {(member.uid, member.uname, member.mode) for member in archive} == {(0, "", 0o600)}


def test_where_an_archive_may_be_written(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("nothing")
    check_target(plain, force=True)
    check_target(tmp_path / "new", force=False)
    for name, force in (("plain", False), ("dangling", False), ("fifo", True), (".", True)):
        with pytest.raises(LaunchError, match="with -o"):
            check_target(tmp_path / name, force=force)
    with pytest.raises(LaunchError, match="cannot write"):
        write(tmp_path / "missing" / "x", b"")
