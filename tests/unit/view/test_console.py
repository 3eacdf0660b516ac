"""Test what the console shows of a run."""

from __future__ import annotations

import os
import sys
import threading
from io import BytesIO
from typing import Any

import pytest

from tests.limits import LIMIT_S
from zlaunch.system.messages import Metrics
from zlaunch.view.console import Console

VALUES = {
    "step": 10,
    "steps": 100,
    "loss": 2.312,
    "lr": 3e-4,
    "loss_scale": 65536.0,
    "grad_norm": 0.52,
    "tokens_per_s": 12345.4,
    "memory_gb": 0.41,
}


def console(*ranks: int, **options: Any) -> tuple[Console, BytesIO, BytesIO]:
    out, err = BytesIO(), BytesIO()
    return Console(ranks, out=out, err=err, terminal=options.pop("terminal", False), **options), out, err


def test_one_rank_passes_bytes_unchanged() -> None:
    shown, out, err = console(0)
    shown.output(0, "stdout", b"\xff half")
    shown.output(1, "stdout", b"not asked for\n")
    shown.output(0, "stderr", b"e\r")
    shown.close()
    assert (out.getvalue(), err.getvalue()) == (b"\xff half", b"e\r")


def test_a_message_does_not_continue_a_line_of_the_rank() -> None:
    shown, _, err = console(0)
    shown.output(0, "stderr", b"an error")
    shown.error("rank 0 failed")
    shown.error("the run has ended")
    shown.output(0, "stderr", b"\n")
    shown.output(0, "stderr", b"\nmore\n")
    shown.error("done")
    lines = [
        b"an error",
        b"zlaunch: error: rank 0 failed",
        b"zlaunch: error: the run has ended",
        b"",
        b"more",
    ]
    assert err.getvalue() == b"\n".join([*lines, b"zlaunch: error: done\n"])


def test_several_ranks_speak_in_prefixed_whole_lines() -> None:
    shown, out, _ = console(0, 3)
    shown.output(3, "stdout", b"one\ntw")
    shown.output(0, "stdout", b"zero\n")
    shown.output(3, "stdout", b"o\nrest")
    shown.close()
    assert out.getvalue() == b"[rank 3] one\n[rank 0] zero\n[rank 3] two\n[rank 3] rest\n"


def test_local_ranks_are_those_of_each_attempts_nodes() -> None:
    shown, out, _ = console(0, local_ranks=[1], role="trainer")
    shown.place({0: 0, 1: 1, 2: 0, 3: 1})
    for rank in range(4):
        shown.output(rank, "stdout", b"x\n")
    shown.place({0: 0, 1: 1})
    for rank in range(2):
        shown.output(rank, "stdout", b"alone\n")
    assert out.getvalue() == b"[trainer 1] x\n[trainer 3] x\nalone\n"


def test_a_long_line_of_several_ranks_is_cut_between_characters() -> None:
    shown, out, _ = console(0, 3)
    text = "x" + "\u00e9\U0001f600" * 20_000
    data = text.encode()
    for at in range(0, len(data), 30_010):
        shown.output(3, "stdout", data[at : at + 30_010])
    shown.close()
    lines = out.getvalue().decode().splitlines()
    assert len(lines) > 1 and "".join(line.removeprefix("[rank 3] ") for line in lines) == text


def test_a_move_by_any_number_of_rows_ends_nothing() -> None:
    shown, out, _ = console(0, terminal=True)
    shown.output(0, "stdout", b"\x1b[" + b"9" * 5000 + b"Adone\n")
    assert b"done" in out.getvalue()


def test_metrics_are_lines_in_a_pipe() -> None:
    shown, out, _ = console(0)
    shown.metrics(Metrics(1, "n", {"step": 10, "memory_gb": 0.42}))
    shown.metrics(Metrics(0, "n", VALUES))
    shown.metrics(Metrics(0, "n", {"step": 11, "loss": None}))
    lines = out.getvalue().decode().splitlines()
    assert lines[0] == (
        "step 10/100 loss 2.312 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 0.42 GB"
    )
    assert lines[1] == "step 11 mem 0.41 0.42 GB"


def test_many_ranks_have_the_range_of_their_memory_in_a_line() -> None:
    shown, out, _ = console(0)
    for rank in range(1, 9):
        shown.metrics(Metrics(rank, "n", {"step": 1, "memory_gb": rank / 10}))
    shown.metrics(Metrics(0, "n", {"step": 1, "memory_gb": 0.4}))
    assert out.getvalue() == b"step 1 mem 0.10-0.80 GB\n"


def test_waiting_is_said_ever_less_often_in_a_pipe() -> None:
    shown, out, err = console(0)
    for seconds in range(5, 60):
        shown.waiting("n2", seconds)
    shown.waiting("", 0.0)
    shown.waiting("torch on n1", 6)
    assert out.getvalue() == b""
    told = [f"zlaunch: waiting for n2 ({seconds} s)" for seconds in (5, 10, 20, 40)]
    assert err.getvalue().decode().splitlines() == [*told, "zlaunch: waiting for torch on n1 (6 s)"]


def test_details_are_for_a_verbose_run() -> None:
    for options, count in (({}, 0), ({"verbose": True}, 1), ({"verbose": True, "quiet": True}, 0)):
        shown, _, err = console(0, **options)
        shown.detail("launcher local")
        assert err.getvalue().count(b"zlaunch: launcher local\n") == count


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", name)
    ours, theirs = os.openpty()
    with open(theirs, "wb") as terminal:
        shown = Console([0], out=terminal, err=terminal)
        event = {"type": "metrics", "rank": 0, "time": 1.0, "values": {"engine_step": 1, **VALUES}}
        shown.progress.take(event)
        shown.metrics(Metrics(0, "n", {"engine_step": 1, **VALUES}))
        shown.waiting("torch", 7)
        shown.close()
        shown.text("end")
        found = b""
        while not found.endswith(b"end\r\n"):
            found += os.read(ours, 4096)
    os.close(ours)
    assert found.decode().splitlines() == [
        "step 10/100 loss 2.312 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 GB",
        "zlaunch: waiting for torch (7 s)",
        "end",
    ]


def test_quiet_leaves_only_the_workers() -> None:
    shown, out, err = console(0, quiet=True)
    shown.metrics(Metrics(0, "n", VALUES))
    shown.message("hello")
    shown.output(0, "stdout", b"x")
    assert (out.getvalue(), err.getvalue()) == (b"x", b"")


def test_progress_bars_of_several_ranks_are_shown_now_and_then() -> None:
    shown, out, _ = console(0, 3)
    for percent in range(100):
        shown.output(3, "stdout", b"\r%d%%" % percent)
    assert out.getvalue().startswith(b"[rank 3] ") and out.getvalue().count(b"\n") == 1, "seen, no flood"
    shown.output(3, "stdout", b"\r100%\r\n")
    assert out.getvalue().endswith(b"[rank 3] 100%\n"), "what a terminal would show in the end"


def test_a_full_disk_behind_the_console_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full:
        shown = Console([0], out=full, terminal=False)
        for _ in range(3):
            shown.output(0, "stdout", b"lost\n")
        shown.close()
    assert capfd.readouterr().err.count("cannot write to stdout") == 1


def test_output_that_is_not_taken_at_once_is_whole() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = b"x" * (1 << 20)
    taken = bytearray()

    def take() -> None:
        while chunk := os.read(reader, 1 << 16):
            taken.extend(chunk)

    thread = threading.Thread(target=take)
    thread.start()
    with open(writer, "wb") as out:
        Console([0], out=out, terminal=False).output(0, "stdout", data)
    thread.join(LIMIT_S)
    os.close(reader)
    assert taken == data


def test_closed_descriptors_are_nobody_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    shown = Console([0])
    shown.output(0, "stdout", b"x")
    shown.close()


def test_a_report_of_the_script_has_its_own_names() -> None:
    shown, out, _ = console(0)
    shown.metrics(Metrics(0, "n", {"engine_step": 1, "step": 1, "samples_per_s": 1234.5, "memory_gb": 0.5}))
    shown.metrics(Metrics(0, "n", {"step": 1, "val_loss": 2.25, "tokens": 5}))
    shown.metrics(Metrics(0, "n", {"steps": 100}))
    shown.metrics(Metrics(0, "n", {"engine_step": 2, "step": 2}, printed=False))
    assert out.getvalue().decode().splitlines() == [
        "step 1 1234 samples/s mem 0.50 GB",
        "step 1 mem 0.50 GB val_loss 2.25",
    ]
