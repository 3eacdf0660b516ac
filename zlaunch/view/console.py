"""Show a run: what the chosen ranks print, the metrics, and the launcher's few messages."""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

from zlaunch.system.messages import Metrics
from zlaunch.view.progress import RunProgress
from zlaunch.view.screen import LineBelow, is_in_foreground, unfinished_bytes

_PARTIAL_LINE_BYTES = 1 << 16
_BAR_S = 1.0
"""Seconds between two shown states of a line that overwrites itself (a progress bar), with several ranks."""
_REDRAW_S = 1.0
"""Seconds after which the progress bar is drawn anew: its clock, the terminal's width."""
_FASTEST_S = 0.1
"""Seconds that one drawing of the progress bar is used for at least."""
_PROMPT_S = 0.5
"""Seconds after which a step shows that rank 0's unfinished line is no prompt."""
_FIRST_WAIT_S = 5.0
"""Seconds of waiting after which a pipe gets a line; then at twice the time, each time."""
_MOST_AMOUNTS = 8
"""Ranks whose memory a line lists one by one."""
_MOVES = re.compile(rb"\x1b\[[0-9;]*[A-HJSTfsu]")
"""Sequences that move the cursor away from its line."""


class Console:
    """Passes bytes through untouched for one rank, prefixes whole lines for several.

    In a terminal a progress bar is the last line; elsewhere each report that is to be printed is a line.
    Whatever happens to the terminal or the file behind it, the run continues: its logs have everything.
    """

    def __init__(
        self,
        ranks: Collection[int] | None,
        *,
        local_ranks: Collection[int] | None = None,
        role: str = "rank",
        quiet: bool = False,
        verbose: bool = False,
        out: BinaryIO | None = None,
        err: BinaryIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self._ranks = None if ranks is None else frozenset(ranks)
        """The ranks to show; None: all of them."""
        self._local_ranks = local_ranks
        """The local ranks to show instead, on each node."""
        self._role = role.encode()
        """Precedes a rank's number."""
        self._prefixed = ranks is None or len(ranks) > 1
        self._quiet = quiet
        self._verbose = verbose and not quiet
        given = {"stdout": (out, sys.stdout), "stderr": (err, sys.stderr)}
        # Python has no object for a descriptor that was closed when it started.
        self._streams: dict[str, BinaryIO] = {
            name: binary or text.buffer for name, (binary, text) in given.items() if binary or text
        }
        self._on_screen = {
            n for n, f in self._streams.items() if (f.isatty() if terminal is None else terminal)
        }
        """The streams that a terminal shows."""
        self._has_bar = "stdout" in self._on_screen and not quiet and (terminal or not _is_dumb())
        self._failed: set[str] = set()
        self._bar_at: dict[tuple[int, str], float] = {}
        self._partial: dict[tuple[int, str], bytes] = {}
        self._is_line_open = False
        """Tells that the only shown rank has written a line to stderr without its end."""
        self._ended_for_rank = False
        """Tells that a message has ended such a line."""
        self._memory_gb: dict[int, float] = {}
        self.progress = RunProgress()
        """Where the run stands; the controller hands it the events."""
        self._own: dict[str, str] = {}
        self._waiting = ""
        self._next_wait_s = _FIRST_WAIT_S
        self._below = LineBelow()
        self._line = b""
        self._line_at = self._drawn_at = -_REDRAW_S
        self._output_at = -_PROMPT_S
        self._has_ended = False

    def place(self, local_ranks: Mapping[int, int]) -> None:
        """Take the local rank of each rank, when an attempt begins."""
        if self._local_ranks is not None:
            self._ranks = frozenset(rank for rank, local in local_ranks.items() if local in self._local_ranks)
            self._prefixed = len(self._ranks) > 1

    @property
    def is_read(self) -> bool:
        """Tell whether what is shown on stdout still arrives anywhere."""
        return "stdout" in self._streams and "stdout" not in self._failed

    @property
    def has_failed(self) -> bool:
        """Tell whether something could not be shown; a reader that has gone is no failure."""
        return bool(self._failed)

    def shows(self, rank: int) -> bool:
        """Tell whether this rank's output was asked for."""
        return self._ranks is None or rank in self._ranks

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Show a piece of a rank's output, if the rank was asked for."""
        if not self.shows(rank):
            return
        if self._prefixed:
            data = self._prefix_lines(rank, stream, data)
        elif stream == "stderr":
            if self._ended_for_rank:
                data = data.removeprefix(b"\n")
            self._ended_for_rank = False
            self._is_line_open = bool(data) and not data.endswith(b"\n")
        if data:
            self._write(stream, data)

    def message(self, text: str) -> None:
        """Show a message of the launcher itself, on stderr."""
        if not self._quiet:
            self.text(f"zlaunch: {text}")

    def detail(self, text: str) -> None:
        """Show a message that only --verbose asks for."""
        if self._verbose:
            self.message(text)

    def error(self, text: str) -> None:
        """Show an error on stderr, also with --quiet."""
        self.text(f"zlaunch: error: {text}")

    def text(self, text: str) -> None:
        """Show lines as they are on stderr, also with --quiet."""
        # A rank may write the end of its line after the line, and a message come between.
        start = b"\n" if self._is_line_open else b""
        self._ended_for_rank = self._ended_for_rank or self._is_line_open
        self._is_line_open = False
        self._write("stderr", start + f"{text}\n".encode("utf-8", "surrogateescape"))

    def waiting(self, what: str, seconds: float) -> None:
        """Show what the run has waited for so long: in a terminal as one line that updates, elsewhere in a
        line now and then. Empty text ends it.
        """
        if not what:
            self._next_wait_s = _FIRST_WAIT_S
        if self._has_bar:
            self._waiting = f"zlaunch: waiting for {what} ({seconds:.0f} s)" if what else ""
            self._redraw()
        elif what and seconds >= self._next_wait_s:
            self._next_wait_s = 2 * seconds
            self.message(f"waiting for {what} ({seconds:.0f} s)")

    def metrics(self, event: Metrics) -> None:
        """Show rank 0's metrics; the other ranks only add their memory to them."""
        values = event.values
        if self._quiet or not isinstance(values, dict):
            return
        memory = values.get("memory_gb")
        if isinstance(memory, (int, float)):
            self._memory_gb[event.rank] = float(memory)
        if event.rank != 0:
            return
        by_script = "engine_step" not in values
        is_printed = event.printed and not (self._has_bar and by_script)
        if is_printed and (text := self._metrics_text(values, by_script=by_script)):
            self._write("stdout", text.encode() + b"\n")
        if self._has_bar:
            self._own |= own_words(values) if by_script else {}
            self._has_ended = False
            self._waiting = ""
            self._redraw(is_step=True)

    def _metrics_text(self, values: Mapping[str, Any], *, by_script: bool) -> str:
        is_step = "engine_step" in values or "step" in values
        memory = [self._memory_gb[rank] for rank in sorted(self._memory_gb)] if is_step else []
        text = metrics_line(values, memory)
        return " ".join([*([text] if text else []), *(own_words(values).values() if by_script else ())])

    def tick(self) -> None:
        """Draw the progress bar anew if it is time to; call it within `next_tick_s` seconds."""
        if self.next_tick_s() <= 0:
            self._redraw()

    def next_tick_s(self) -> float:
        """Return the seconds until `tick` has something to do; infinite without a bar."""
        if not self._has_bar or self._has_ended or not (self._waiting or self.progress.ranks):
            return float("inf")
        return max(0.0, self._drawn_at + _REDRAW_S - time.monotonic())

    def step_aside(self) -> None:
        """Erase the progress bar until the next tick: somebody else gets the terminal."""
        self._put("stdout", self._below.erased())

    def close(self) -> None:
        """Show unfinished lines and leave the last state of the bar standing, at the end of an attempt."""
        self._waiting = ""
        for (rank, stream), rest in self._partial.items():
            if rest:
                self._write(stream, b"[%s %d] %s\n" % (self._role, rank, rest))
        self._partial.clear()
        if self._has_bar and not self._has_ended:
            self._line_at = -_FASTEST_S
            line = self._bar()
            erased = self._below.erased()
            if line:
                self._put("stdout", erased + b"\n" * self._below.is_unfinished + line + b"\n")
                self._below.passed(b"\n")
        self._has_ended = True

    def _prefix_lines(self, rank: int, stream: str, data: bytes) -> bytes:
        key = rank, stream
        whole, end, rest = (self._partial.get(key, b"") + data).rpartition(b"\n")
        whole += end
        if b"\r" in whole:
            whole = b"\n".join(_last_state(line) for line in whole.split(b"\n"))
        if b"\r" in rest:
            now = time.monotonic()
            states, rest = rest.rpartition(b"\r")[::2]
            if now - self._bar_at.get(key, -_BAR_S) >= _BAR_S and (state := _last_state(states)):
                self._bar_at[key] = now
                whole += state + b"\n"
        if len(rest) > _PARTIAL_LINE_BYTES:
            cut = len(rest) - unfinished_bytes(rest)
            whole = whole + rest[:cut] + b"\n"
            rest = rest[cut:]
        self._partial[key] = rest
        if self._on_screen:  # a move within one rank's lines would end in another's
            whole = _MOVES.sub(b"", whole)
        start = b"[%s %d] " % (self._role, rank)
        # not line by line: there may be millions
        return start + whole[:-1].replace(b"\n", b"\n" + start) + b"\n" if whole else b""

    def _write(self, stream: str, data: bytes) -> None:
        if stream not in self._on_screen:
            self._put(stream, data)
            return
        was_free = self._below.is_free(self._columns())
        erased = self._below.erased()
        self._below.passed(data)
        self._output_at = time.monotonic()
        # where the cursor was moved about, the next bytes may follow at once: the next tick looks again
        drawn = self._drawn() if was_free and stream == "stdout" else b""
        if stream == "stdout":
            self._put(stream, erased + data + drawn)
            return
        self._put("stdout", erased)
        self._put(stream, data)
        self._put("stdout", self._drawn() if was_free else b"")

    def _redraw(self, *, is_step: bool = False) -> None:
        self._drawn_at = time.monotonic()
        self._put("stdout", self._below.erased() + self._drawn(is_step=is_step))

    def _drawn(self, *, is_step: bool = False) -> bytes:
        """Return what draws the line where it may be, see Note [The line below]; nothing elsewhere.
        ``is_step``: rank 0 has just made a step.
        """
        below = self._below
        may_be_prompt = below.is_unfinished and not below.overwrites_itself
        if is_step and time.monotonic() - self._output_at >= _PROMPT_S:
            may_be_prompt = False  # who waits for an answer makes no step
        if not self._has_bar or self._has_ended or may_be_prompt:
            return b""
        if not below.is_free(self._columns()) or not self._is_in_foreground():
            return b""
        line = self._waiting.encode()[: self._width()] if self._waiting else self._bar()
        return below.drawn(line) if line else b""

    def _bar(self) -> bytes:
        now = time.monotonic()
        if now - self._line_at >= _FASTEST_S:
            if not self.progress.ranks:
                return b""
            from zlaunch.view.bar import draw_bar  # rich takes its time

            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            text = draw_bar(self.progress, self._own, time.time(), self._width(), encoding)
            self._line = text.encode(encoding, "replace")
            self._line_at = now
        return self._line

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._streams["stdout"].fileno()).columns
        except (OSError, ValueError, KeyError):
            columns = 0
        return columns or shutil.get_terminal_size().columns

    def _width(self) -> int:
        """Return the columns that a line may have: in the last one, terminals differ."""
        return max(1, self._columns() - 1)

    def _is_in_foreground(self) -> bool:
        try:
            return is_in_foreground(self._streams["stdout"].fileno())
        except (OSError, ValueError, KeyError):
            return True

    def _put(self, stream: str, data: bytes) -> None:
        """Write all data; a reader that has gone (`| head`), a full disk or a lost terminal ends nothing."""
        file = self._streams.get(stream)
        if file is None or not data:
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
                self.error(f"cannot write to {stream}: {error}; the logs have the output")


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


def _is_dumb() -> bool:
    """Tell whether the terminal says that it cannot move its cursor."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def _last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line that overwrites itself."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_LINE = (
    "step",
    "steps",
    "of_epoch",
    "loss",
    "lr",
    "loss_scale",
    "grad_norm",
    "tokens_per_s",
    "samples_per_s",
    "tflops",
    "mfu",
)


def own_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Write the values that a line has no words of its own for, by name."""
    known = (*_LINE, "memory_gb", "host_gb", "gpu_use", "tokens", "micro_tokens", "moved_mb", "disk_mb")
    return {
        name: f"{name} {value:.4g}"
        for name, value in values.items()
        if name not in known and isinstance(value, (int, float))
    }


def _is_share(value: object) -> bool:
    """Tell whether a value can be a share: a script may report a number of its own under the name."""
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _memory(amounts: Collection[float]) -> str:
    """Write the memory of each rank; of many ranks the least and the most."""
    if len(amounts) > _MOST_AMOUNTS:
        return f"{min(amounts):.2f}-{max(amounts):.2f}"
    return " ".join(f"{amount:.2f}" for amount in amounts)


def metrics_line(values: Mapping[str, Any], memory_gb: Collection[float]) -> str:
    """Format the line `step 10/100 loss 2.31 lr 3.0e-04 scale 65536 norm 0.52 12345 tok/s mem 0.41 GB`."""

    def shown(key: str, template: str) -> list[str]:
        value = values.get(key)
        return [template.format(value)] if isinstance(value, (int, float)) else []

    steps = values.get("steps")
    of = f"/{steps:.0f}" if isinstance(steps, (int, float)) and steps else ""
    epoch = values.get("of_epoch")
    of += f" (epoch {epoch:.0f})" if of and isinstance(epoch, (int, float)) else ""
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
        words.append(f"mem {_memory(memory_gb)} GB")
    return " ".join(words)
