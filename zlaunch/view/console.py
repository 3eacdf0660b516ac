"""Show a run: what the chosen ranks print, the metrics, and the launcher's few messages."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

_PARTIAL_LINE_BYTES = 1 << 16
_BAR_S = 1.0
"""Seconds between two shown states of a line that overwrites itself (a progress bar), with several ranks."""
_KEEP_S = 10.0
"""Seconds after which the status line is left standing, so that a look back shows how the numbers went."""


class Console:
    """Passes bytes through untouched for one rank, prefixes whole lines for several.

    In a terminal the metrics are one status line below the output; elsewhere each report is a line. Whatever
    happens to the terminal or the file behind it, the run goes on: its logs have everything.
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
        """The ranks to show; None: all of them."""
        self._prefixed = ranks is None or len(ranks) > 1
        self._quiet = quiet
        given = {"stdout": (out, sys.stdout), "stderr": (err, sys.stderr)}
        # Python has no object for a descriptor that was closed when it started.
        self._streams: dict[str, BinaryIO] = {
            name: binary or text.buffer for name, (binary, text) in given.items() if binary or text
        }
        shown = self._streams.get("stdout")
        self._terminal = (shown is not None and shown.isatty()) if terminal is None else terminal
        self._failed: set[str] = set()
        self._bar_at: dict[tuple[int, str], float] = {}
        self._kept_at = time.monotonic()
        self._partial: dict[tuple[int, str], bytes] = {}
        self._memory_gb: dict[int, float] = {}
        self._status = ""
        self._at_line_start = True

    @property
    def is_read(self) -> bool:
        """Tell whether what is shown on stdout still arrives anywhere."""
        return "stdout" in self._streams and "stdout" not in self._failed

    def shows(self, rank: int) -> bool:
        """Tell whether this rank's output was asked for."""
        return self._ranks is None or rank in self._ranks

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Show a piece of a rank's output, if the rank was asked for."""
        if not self.shows(rank):
            return
        if self._prefixed:
            data = self._prefix_lines(rank, stream, data)
        if data:
            self._write(stream, data)

    def message(self, text: str) -> None:
        """Show a message of the launcher itself, on stderr."""
        if not self._quiet:
            self.text(f"zlaunch: {text}")

    def error(self, text: str) -> None:
        """Show an error on stderr, also with --quiet."""
        self.text(f"zlaunch: error: {text}")

    def text(self, text: str) -> None:
        """Show lines as they are on stderr, also with --quiet."""
        self._write("stderr", f"{text}\n".encode("utf-8", "surrogateescape"))

    def metrics(self, event: Mapping[str, Any]) -> None:
        """Show rank 0's metrics as a line; the other ranks only add their memory to it."""
        values = event.get("values")
        if self._quiet or not isinstance(values, dict):
            return
        memory = values.get("memory_gb")
        if isinstance(memory, (int, float)):
            self._memory_gb[event["rank"]] = float(memory)
        if event["rank"] != 0 or not (self._terminal or event.get("printed", True)):
            return
        is_step = "engine_step" in values or "step" in values
        text = metrics_line(
            values, [self._memory_gb[rank] for rank in sorted(self._memory_gb)] if is_step else []
        )
        if "engine_step" not in values:  # the script's own report
            text = " ".join([*([text] if text else []), *_own_words(values)])
        if not text:
            return
        if self._terminal:
            now = time.monotonic()
            if self._status and self._at_line_start and now - self._kept_at >= _KEEP_S:
                self._kept_at = now
                self._put("stdout", b"\n")
            else:
                self._hide_status()
            self._status = text
            self._show_status()
        else:
            self._write("stdout", text.encode() + b"\n")

    def close(self) -> None:
        """Show unfinished lines and leave the last status standing, at the end of an attempt."""
        for (rank, stream), rest in self._partial.items():
            if rest:
                self._write(stream, b"[rank %d] %s\n" % (rank, rest))
        self._partial.clear()
        if self._status and self._at_line_start:
            self._put("stdout", b"\n")
        self._status = ""

    def _prefix_lines(self, rank: int, stream: str, data: bytes) -> bytes:
        key = rank, stream
        *lines, rest = (self._partial.get(key, b"") + data).split(b"\n")
        lines = [_last_state(line) for line in lines]
        if b"\r" in rest:
            now = time.monotonic()
            states, rest = rest.rpartition(b"\r")[::2]
            if now - self._bar_at.get(key, -_BAR_S) >= _BAR_S and (state := _last_state(states)):
                self._bar_at[key] = now
                lines.append(state)
        if len(rest) > _PARTIAL_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[key] = rest
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
        """Show the status only below a finished line: a worker may be drawing a progress bar or a prompt."""
        if self._status and self._at_line_start:
            width = shutil.get_terminal_size().columns - 1
            self._put("stdout", self._status[:width].encode())

    def _put(self, stream: str, data: bytes) -> None:
        """Write all data; a reader that has gone (`| head`), a full disk or a lost terminal ends nothing."""
        file = self._streams.get(stream)
        if file is None:
            return
        try:
            _write_all(file, data)
        except BrokenPipeError:
            del self._streams[stream]
            # What is left in Python's own buffer would raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        except (OSError, ValueError) as error:
            if stream not in self._failed:
                self._failed.add(stream)
                self.error(f"cannot write to {stream}: {error}; the run goes on, its logs have the output")


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Write all data to the descriptor, if there is one, even if it has been made non-blocking."""
    file.flush()
    try:
        fd = file.fileno()
    except OSError:  # a buffer in memory
        file.write(data)
        return
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line that overwrites itself."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_LINE = (
    "step",
    "steps",
    "loss",
    "lr",
    "loss_scale",
    "grad_norm",
    "tokens_per_s",
    "samples_per_s",
    "tflops",
    "mfu",
)


def _own_words(values: Mapping[str, Any]) -> list[str]:
    """Write the values that a line has no words of its own for."""
    known = (*_LINE, "memory_gb", "host_gb", "gpu_use", "tokens", "micro_tokens", "moved_mb", "disk_mb")
    return [
        f"{name} {value:.4g}"
        for name, value in values.items()
        if name not in known and isinstance(value, (int, float))
    ]


def _is_share(value: object) -> bool:
    """Tell whether a value can be a share: a script may report a number of its own under the name."""
    return isinstance(value, (int, float)) and 0 <= value <= 1


def metrics_line(values: Mapping[str, Any], memory_gb: Collection[float]) -> str:
    """Format the line `step 10/100 loss 2.31 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 GB`."""

    def shown(key: str, template: str) -> list[str]:
        value = values.get(key)
        return [template.format(value)] if isinstance(value, (int, float)) else []

    steps = values.get("steps")
    of = f"/{steps:.0f}" if isinstance(steps, (int, float)) and steps else ""
    step = shown("step", "step {:.0f}" + of)
    words = [
        *step,
        *shown("loss", "loss {:.4g}"),
        *shown("lr", "lr {:.1e}"),
        *shown("loss_scale", "scale {:.10g}"),
        *shown("grad_norm", "norm {:.3g}"),
        *shown("tokens_per_s", "{:.0f} tok/s"),
        *([] if "tokens_per_s" in values else shown("samples_per_s", "{:.4g} samples/s")),
        *shown("tflops", "{:.3g} TFLOPS"),
        *(shown("mfu", "MFU {:.1%}") if _is_share(values.get("mfu")) else shown("mfu", "mfu {:.3g}")),
    ]
    if memory_gb:
        words.append("mem " + " ".join(f"{value:.2f}" for value in memory_gb) + " GB")
    return " ".join(words)
