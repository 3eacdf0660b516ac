"""What the console shows of a run."""

from __future__ import annotations

from io import BytesIO
from typing import Any

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
