"""Test what the console shows of a run."""

from __future__ import annotations

import os
import sys
import threading
from io import BytesIO
from typing import Any

import pytest

from tests.limits import LIMIT_S
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


def test_several_ranks_speak_in_prefixed_whole_lines() -> None:
    shown, out, _ = console(0, 3)
    shown.output(3, "stdout", b"one\ntw")
    shown.output(0, "stdout", b"zero\n")
    shown.output(3, "stdout", b"o\nrest")
    shown.close()
    assert out.getvalue() == b"[rank 3] one\n[rank 0] zero\n[rank 3] two\n[rank 3] rest\n"


def test_metrics_are_lines_in_a_pipe() -> None:
    shown, out, _ = console(0)
    shown.metrics({"rank": 1, "values": {"step": 10, "memory_gb": 0.42}})
    shown.metrics({"rank": 0, "values": VALUES})
    shown.metrics({"rank": 0, "values": {"step": 11, "loss": None}})
    lines = out.getvalue().decode().splitlines()
    assert lines[0] == (
        "step 10/100 loss 2.312 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 0.42 GB"
    )
    assert lines[1] == "step 11 mem 0.41 0.42 GB"


def test_metrics_are_a_status_line_in_a_terminal() -> None:
    shown, out, _ = console(0, terminal=True)
    shown.metrics({"rank": 0, "values": {"step": 1}})
    shown.output(0, "stdout", b"hello\n")
    shown.output(0, "stdout", b"progress")
    shown.metrics({"rank": 0, "values": {"step": 2}})
    shown.output(0, "stdout", b" done\n")
    shown.close()
    clear = b"\r\x1b[K"
    assert out.getvalue() == b"".join(
        [b"step 1", clear, b"hello\n", b"step 1", clear, b"progress", b" done\n", b"step 2", b"\n"]
    )


def test_quiet_leaves_only_the_workers() -> None:
    shown, out, err = console(0, quiet=True)
    shown.metrics({"rank": 0, "values": VALUES})
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


def test_the_status_line_leaves_a_trail(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("zlaunch.view.console.time.monotonic", lambda: clock[0])
    shown, out, _ = console(0, terminal=True)
    for step in range(5):
        clock[0] += 6.0
        shown.metrics({"rank": 0, "values": {"step": step}})
    standing = out.getvalue().replace(b"\r\x1b[K", b"<").split(b"\n")
    assert [line.rpartition(b"<")[2] for line in standing] == [b"step 0", b"step 2", b"step 4"]


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
    shown.metrics(
        {"rank": 0, "values": {"engine_step": 1, "step": 1, "samples_per_s": 1234.5, "memory_gb": 0.5}}
    )
    shown.metrics({"rank": 0, "values": {"step": 1, "val_loss": 2.25, "tokens": 5}})
    shown.metrics({"rank": 0, "values": {"steps": 100}})
    shown.metrics({"rank": 0, "printed": False, "values": {"engine_step": 2, "step": 2}})
    assert out.getvalue().decode().splitlines() == [
        "step 1 1234 samples/s mem 0.50 GB",
        "step 1 mem 0.50 GB val_loss 2.25",
    ]
