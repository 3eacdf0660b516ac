"""Test the line below the output in a terminal emulator: it shows, and harms nothing that others write."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import pyte
import pytest

from zlaunch.system.messages import Metrics
from zlaunch.view.console import Console
from zlaunch.view.screen import LineBelow

BAR = b"bar " * 4
_TQDM = [b"\r%3d%%|#####     | %d/100" % (n, n) for n in (5, 50, 100)]
PIECES = (
    *([b"word "], [b"end of line\n"], [b"\n"], [b"two\nlines\n"], [b"long " * 30], [b"x" * 39], [b"y" * 40]),
    *([b"z" * 80 + b"\n"], [b"\x1b[31mred\x1b[0m\n"], [b"\x1b[1;44mbold"], [b"still\n\x1b[0m"]),
    *([b"erased\x1b[K\n"], [b"\ttab\n"], [b"\x1b]0;title\x07"], [b"a\x08b"], [b"\x1b[3", b"2mgreen\n"]),
    *(["ö–日本\n".encode()], ["é".encode()[:1], "é".encode()[1:]], ["日".encode()[:2], "日".encode()[2:]]),
    *(_TQDM, [*_TQDM, b"\n"], [b"50%\r", b"100%\r\n"], [b"\r outer", b"\n", b"\r inner", b"\x1b[A"]),
)
"""What ranks may write, and where it may be cut."""


class Terminal:
    """A terminal that shows bytes."""

    def __init__(self, columns: int = 40, rows: int = 8) -> None:
        self.screen: Any = pyte.HistoryScreen(columns, rows, history=10_000)
        self.screen.set_mode(pyte.modes.LNM)  # the kernel's terminal makes \r\n of \n
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes) -> None:
        """Show bytes."""
        self._stream.feed(data)

    def state(self) -> tuple[list[list[Any]], int, int]:
        """Return the rows down to the last that is not empty, with their colors, and the cursor's place."""
        columns, rows = self.screen.columns, self.screen.lines
        above = list(self.screen.history.top)
        found = [[row[x] for x in range(columns)] for row in above]
        found += [[self.screen.buffer[y][x] for x in range(columns)] for y in range(rows)]
        while found and all(cell.data == " " and cell.bg == "default" for cell in found[-1]):
            found.pop()
        return found, len(above) + self.screen.cursor.y, self.screen.cursor.x

    def lines(self) -> list[str]:
        """Return the text of these rows."""
        return ["".join(cell.data for cell in row).rstrip() for row in self.state()[0]]


@pytest.mark.parametrize("seed", range(40))
def test_what_others_write_is_as_it_would_be_without_the_line(seed: int) -> None:
    draw = random.Random(seed)
    alone, shared, below, shown = Terminal(), Terminal(), LineBelow(), 0
    for piece in [piece for _ in range(40) for piece in draw.choice(PIECES)]:
        alone.feed(piece)
        shared.feed(below.erased())
        shared.feed(piece)
        below.passed(piece)
        for _ in range(draw.choice((0, 1, 1, 2))):
            if below.is_free(40):
                shared.feed(below.erased() + below.drawn(BAR))
                assert "bar bar" in shared.lines()[-1]
                shown += 1
        shared.feed(below.erased() if draw.random() < 0.3 else b"")
        if not below.is_shown:
            assert shared.state() == alone.state(), (piece, alone.lines(), shared.lines())
    assert shown > 10


def test_colors_that_are_left_on_are_on_again_after_the_line() -> None:
    terminal, below = Terminal(), LineBelow()
    terminal.feed(b"\x1b[31mred\n")
    below.passed(b"\x1b[31mred\n")
    terminal.feed(below.drawn(BAR))
    assert terminal.state()[0][-1][0].fg == "default"
    terminal.feed(below.erased() + b"more\n")
    assert terminal.state()[0][1][0].fg == "red" and terminal.lines() == ["red", "more"]


@pytest.mark.parametrize("columns", [20, 100])
def test_a_terminal_of_another_width_has_the_output_whole(columns: int) -> None:
    terminal, below = Terminal(columns=60), LineBelow()
    terminal.feed(b"one\n" + below.drawn(b"=" * 59))
    below.passed(b"one\n")
    terminal.screen.resize(columns=columns)
    terminal.feed(below.erased() + b"two\n" + below.drawn(b"=" * 10))
    assert terminal.lines() == ["one", "two", "=" * 10]


class Shown:
    """A console in a terminal, with a run that has made some steps."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *ranks: int, columns: int = 80, **options: Any
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr("zlaunch.view.console.time.monotonic", lambda: self.now)
        monkeypatch.setattr("zlaunch.view.console.time.time", lambda: self.now)
        monkeypatch.setattr("zlaunch.view.console.Console._columns", lambda _: columns)
        self.out = BytesIO()
        self.terminal, self._read = Terminal(columns, 24), 0
        self.console = Console(ranks or (0,), out=self.out, err=self.out, terminal=True, **options)
        self.console.progress.take({"type": "start", "time": self.now, "attempt": 0})

    def step(self, step: int = 1, after_s: float = 1.0, rank: int = 0, **values: Any) -> None:
        """A rank makes a step."""
        self.now += after_s
        values = {"engine_step": step, "step": step, **values}
        event = {"type": "metrics", "rank": rank, "time": self.now, "printed": False, "values": values}
        self.console.progress.take(event)
        self.console.metrics(Metrics(rank, "n", values, printed=False))

    def write(self, data: bytes, after_s: float = 0.0) -> None:
        """Rank 0 writes something."""
        self.now += after_s
        self.console.output(0, "stdout", data)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.console.tick()

    @property
    def lines(self) -> list[str]:
        """What the terminal shows now."""
        data = self.out.getvalue()
        self.terminal.feed(data[self._read :])
        self._read = len(data)
        return self.terminal.lines()


def test_a_run_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, columns=100)
    shown.step(1, steps=4000, loss=9.0)
    shown.step(101, 10.0, rank=1, memory_gb=12.5)
    shown.step(101, 0.0, steps=4000, loss=2.5, tokens_per_s=12345.4, memory_gb=11.0, lr=3e-4)
    shown.write(b"hello\n")
    hello, bar = shown.lines
    assert hello == "hello" and bar.lstrip("━╺╸ ") == (
        "101/4000 0:11 ETA 6:29 loss 2.5 12345 tok/s 12.50 GB lr 3.0e-04"
    )
    shown.wait(61)
    assert shown.lines[1].lstrip("━╺╸ ").startswith("101/4000 1:12 ETA")
    shown.step(4000, 1.0, steps=4000)
    shown.console.close()
    shown.console.message("bye")
    done = shown.lines
    assert done[1].startswith("━" * 10) and "4000/4000 1:13 loss" in done[1] and "ETA" not in done[1]
    assert done[2:] == ["zlaunch: bye"], "the last state is left standing"


def test_the_line_fits_into_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (20, 40, 60, 300):
        shown = Shown(monkeypatch, columns=columns)
        shown.step(1, steps=1000)
        own = {f"own_{n}": n * 1.5 for n in range(20)}
        shown.step(500, steps=1000, loss=2.5, samples_per_s=17.0, memory_gb=1.0, grad_norm=0.5, mfu=0.4)
        shown.console.metrics(Metrics(0, "n", {"step": 500, "evil\n\x1b[2J": 1.0, **own}))
        shown.write(b"x\n", after_s=0.2)
        assert len(shown.lines) == 2, columns
        if columns == 40:
            assert shown.lines[1].lstrip("━╺╸ ") == "500/1000 0:02 ETA 0:01 loss 2.5"
        if columns == 300:
            assert "norm 0.5 MFU 40.0% evil" in shown.lines[1] and "own_0 0 own_1 1.5" in shown.lines[1]


def test_a_run_of_unknown_length_has_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    shown.step(7, loss=2.5, samples_per_s=17.0)
    assert shown.lines == ["step 7 0:01 loss 2.5 17 samples/s"]


def test_the_bar_steps_aside_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    shown.step(1)
    shown.write(b"(Pdb) ")
    shown.step(2, after_s=0.1)  # it was on its way
    shown.wait(100)
    shown.console.output(1, "stdout", b"somebody else\n")
    assert shown.lines == ["(Pdb)"]
    shown.step(3)
    assert shown.lines == ["(Pdb)", "step 3 1:42"], "a script that makes steps does not wait for an answer"
    shown.write(b"more\n")
    assert shown.lines == ["(Pdb) more", "step 3 1:42"]


def test_the_bar_is_below_a_progress_bar_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    for step in range(30):
        shown.step(step)
        shown.write(b"\r%2d it" % step)
    assert shown.lines == ["29 it", "step 29 0:30"]
    shown.write(b"\n" * 30)
    for _ in range(3):  # several bars of the script, one below the other
        shown.write(b"\r outer")
        shown.write(b"\n")
        shown.write(b"\r inner")
        shown.write(b"\x1b[A")
    shown.wait(5)
    assert shown.lines[-2:] == [" outer", " inner"]


def test_another_ranks_moves_of_the_cursor_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, 0, 1)
    shown.step(1)
    shown.console.output(1, "stdout", b"one\n\x1b[A\rtwo\x1b[31m\n")
    assert shown.lines == ["[rank 1] one", "[rank 1] two", "step 1 0:01"]


def test_waiting_is_one_line_that_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    for seconds in (5, 6, 7):
        shown.console.waiting("torch on localhost", seconds)
    assert shown.lines == ["zlaunch: waiting for torch on localhost (7 s)"]
    shown.console.waiting("", 0.0)
    assert shown.lines == []


def test_quiet_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, quiet=True)
    shown.console.waiting("torch", 7)
    shown.step(1)
    shown.write(b"x\n")
    shown.wait(5)
    shown.console.close()
    assert shown.out.getvalue() == b"x\n"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color in (False, True):
        monkeypatch.setenv("NO_COLOR", "1" if no_color else "")
        shown = Shown(monkeypatch)
        shown.step(1, steps=10, loss=1.0)
        assert "1/10" in shown.lines[0]
        assert all(cell.fg == "default" for cell in shown.terminal.state()[0][0]) is no_color
