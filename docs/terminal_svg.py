"""Run the README's example on a terminal and draw the screen as an SVG file.

    python -m docs.terminal_svg            # writes docs/assets/terminal.svg

The command runs for real, in an empty folder beside a copy of `examples/`, on a pseudo-terminal that pyte
emulates. The picture is the screen at the end of the run. Needs the extra `docs`.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "terminal.svg"
COMMAND = "zlaunch --num_gpus 2 examples/quickstart/zero3.py"
COLUMNS = 112
ROWS = 50
_NAMES = {"brown": "yellow", "brightbrown": "bright_yellow"}
"""pyte's names for colours that rich calls otherwise."""


def screen_after(command: str) -> pyte.Screen:
    """Run `command` on a terminal of COLUMNS x ROWS; return its screen at the end."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZLAUNCH_")}
    for name in ("NO_COLOR", "COLUMNS", "LINES", "CI"):
        kept.pop(name, None)
    programs = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=folder,
            env={**kept, "PATH": programs, "TERM": "xterm-256color"},
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        try:
            while True:
                try:
                    data = os.read(mine, 65536)
                except OSError:  # EIO: the last process has closed the terminal
                    break
                if not data:
                    break
                stream.feed(data)
            code = process.wait()
        finally:
            os.close(mine)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code:
        sys.exit("\n".join([*lines_of(screen), f"{command} exited with code {code}"]))
    if screen.display[-1].strip():
        sys.exit(f"the output does not fit into {ROWS} rows: raise ROWS in {__file__}")
    return screen


def lines_of(screen: pyte.Screen) -> list[str]:
    """Return the screen's text without empty lines at the end."""
    return "\n".join(line.rstrip() for line in screen.display).rstrip().splitlines()


def colour(name: str) -> str | None:
    """Return rich's name of one of pyte's colours; None for the terminal's default."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return _NAMES.get(name, re.sub("^bright", "bright_", name))


def styled(screen: pyte.Screen, row: int, length: int) -> Text:
    """Return a row of the screen with its colours."""
    text = Text()
    cells = [screen.buffer[row][column] for column in range(length)]
    for look, run in groupby(cells, lambda cell: (cell.fg, cell.bg, cell.bold, cell.italics, cell.reverse)):
        fg, bg, bold, italic, reverse = look
        style = Style(color=colour(fg), bgcolor=colour(bg), bold=bold, italic=italic, reverse=reverse)
        text.append("".join(cell.data for cell in run), style)
    return text


def draw(command: str, screen: pyte.Screen) -> str:
    """Return an SVG of a terminal that shows `command` and its screen; it loads no fonts from the network."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for row, line in enumerate(lines_of(screen)):
        console.print(styled(screen, row, len(line)))
    picture = console.export_svg(title="zlaunch", unique_id="terminal")
    picture = re.sub(r"\s*@font-face \{[^}]*\}", "", picture)
    return "".join(f"{line.rstrip()}\n" for line in picture.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the screen after the README's example.")
    parser.add_argument("--out", type=Path, default=PICTURE, help="file to write [default: %(default)s]")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(draw(COMMAND, screen_after(COMMAND)))
    print(out)


if __name__ == "__main__":
    main()
