"""The console of a run: what the chosen ranks print, the metrics, and the launcher's own few words."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

_PARTIAL_LINE_BYTES = 1 << 16


class Console:
    """Passes bytes through untouched for one rank, prefixes whole lines for several.

    In a terminal the metrics are one status line below the output; elsewhere each report is a line.
    """

    def __init__(
        self,
        ranks: Collection[int] | None,
        *,
        quiet: bool = False,
        out: BinaryIO | None = None,
        err: BinaryIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self._ranks = None if ranks is None else frozenset(ranks)
        """None: all of them."""
        self._prefixed = ranks is None or len(ranks) > 1
        self._quiet = quiet
        self._streams = {"stdout": out or sys.stdout.buffer, "stderr": err or sys.stderr.buffer}
        self._terminal = self._streams["stdout"].isatty() if terminal is None else terminal
        self._partial: dict[tuple[int, str], bytes] = {}
        self._memory_gb: dict[int, float] = {}
        self._status = ""
        self._at_line_start = True

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Show a piece of a rank's output, if the rank was asked for."""
        if self._ranks is not None and rank not in self._ranks:
            return
        if self._prefixed:
            data = self._prefix_lines(rank, stream, data)
        if data:
            self._write(stream, data)

    def message(self, text: str) -> None:
        """A word of the launcher itself, on stderr."""
        if not self._quiet:
            self._write("stderr", f"zlaunch: {text}\n".encode("utf-8", "surrogateescape"))

    def error(self, text: str) -> None:
        """Something that the user has to know, on stderr, also when it is to be quiet."""
        self._write("stderr", f"zlaunch: error: {text}\n".encode("utf-8", "surrogateescape"))

    def metrics(self, event: Mapping[str, Any]) -> None:
        """Rank 0's metrics make a line; the other ranks only add their memory to it."""
        values = event.get("values")
        if self._quiet or not isinstance(values, dict):
            return
        memory = values.get("memory_gb")
        if isinstance(memory, (int, float)):
            self._memory_gb[event["rank"]] = float(memory)
        if event["rank"] != 0:
            return
        text = metrics_line(values, [self._memory_gb[rank] for rank in sorted(self._memory_gb)])
        if self._terminal:
            self._hide_status()
            self._status = text
            self._show_status()
        else:
            self._write("stdout", text.encode() + b"\n")

    def close(self) -> None:
        """Show unfinished lines and leave the last status standing: a run, or an attempt at it, is over."""
        for (rank, stream), rest in self._partial.items():
            if rest:
                self._write(stream, b"[rank %d] %s\n" % (rank, rest))
        self._partial.clear()
        if self._status and self._at_line_start:
            self._put("stdout", b"\n")
        self._status = ""

    def _prefix_lines(self, rank: int, stream: str, data: bytes) -> bytes:
        *lines, rest = (self._partial.get((rank, stream), b"") + data).split(b"\n")
        if len(rest) > _PARTIAL_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[rank, stream] = rest
        return b"".join(b"[rank %d] %s\n" % (rank, line) for line in lines)

    def _write(self, stream: str, data: bytes) -> None:
        self._hide_status()
        self._put(stream, data)
        self._at_line_start = data.endswith(b"\n")
        self._show_status()

    def _hide_status(self) -> None:
        if self._status and self._at_line_start:
            self._put("stdout", b"\r\x1b[K")

    def _show_status(self) -> None:
        """Only below a finished line: a worker may be drawing a progress bar or a prompt."""
        if self._status and self._at_line_start:
            width = shutil.get_terminal_size().columns - 1
            self._put("stdout", self._status[:width].encode())

    def _put(self, stream: str, data: bytes) -> None:
        """Write and flush; a reader that has gone away (`| head`) does not end the training."""
        file = self._streams.get(stream)
        if file is None:
            return
        try:
            file.write(data)
            file.flush()
        except BrokenPipeError:
            del self._streams[stream]
            # What is left in Python's own buffer would raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def metrics_line(values: Mapping[str, Any], memory_gb: Collection[float]) -> str:
    """`step 10/100 loss 2.31 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 0.42 GB`."""

    def shown(key: str, template: str) -> list[str]:
        value = values.get(key)
        return [template.format(value)] if isinstance(value, (int, float)) else []

    steps = values.get("steps")
    step = shown("step", "step {}" + (f"/{steps}" if steps else ""))
    words = [
        *step,
        *shown("loss", "loss {:.4g}"),
        *shown("lr", "lr {:.1e}"),
        *shown("loss_scale", "scale {:.10g}"),
        *shown("grad_norm", "norm {:.3g}"),
        *shown("tokens_per_s", "{:.0f} tok/s"),
    ]
    if memory_gb:
        words.append("mem " + " ".join(f"{value:.2f}" for value in memory_gb) + " GB")
    return " ".join(words)
