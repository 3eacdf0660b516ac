"""Test a run in a real terminal: its progress bar, and what else is on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from tests.e2e.helpers import ROOT, run
from tests.limits import LIMIT_S, wait_until

COMMAND = f"{sys.executable} -m zlaunch --run_dir=run --no_preload --num_gpus=2"
WORKER = """
    import os, time, zlaunch

    def steps(first, last):
        for step in range(first, last):
            zlaunch.report(step=step, steps=30, loss=1.0)
            time.sleep(0.02)

    def wait(name):
        while not os.path.exists(name):
            time.sleep(0.02)

    first = os.environ["RANK"] == "0"
    steps(1, 11)
    print("ten steps", flush=True)
    wait("go")
"""


class Terminal:
    """A shell in a terminal emulator."""

    def __init__(self, folder: Path, columns: int = 80, rows: int = 24) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.written = b""
        """All that was written to the terminal."""
        self._controller, terminal = pty.openpty()
        self.resize(columns)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PS1": "shell> "}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder,
            env=env,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._controller, 1 << 16):
                with self._lock:
                    self._stream.feed(data)
                    self.written += data
        except OSError:  # nobody has the terminal any more
            pass

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._controller, text.encode())

    def resize(self, columns: int) -> None:
        """Make the window narrower or wider."""
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with self._lock:
            self._screen.resize(columns=columns)

    @property
    def lines(self) -> list[str]:
        """What the screen shows, down to the last line that is not empty."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    def shows(self, text: str, *, last: bool = False) -> None:
        """Wait until a line, or the last one, has a text."""
        wait_until(
            lambda: any(text in line for line in self.lines[-1 if last else 0 :]), lambda: str(self.lines)
        )

    def close(self) -> None:
        """End the shell, which ends the run."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        os.close(self._controller)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_a_run_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Its bar is the last line and steps aside for a prompt, and stays at the end; the output is whole."""
    more = """
    if first:
        print("name? ", end="", flush=True)
        print("it is", input(), flush=True)
        for percent in range(0, 101, 10):
            print(f"\\rcopied {percent}%", end="", flush=True)
            zlaunch.report(step=20, steps=30)
            time.sleep(0.02)
        wait("further")
        print()
    steps(21, 31)
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER) + textwrap.dedent(more))
    terminal.type(f"{COMMAND} worker.py; echo ended $?\n")
    terminal.shows("ten steps")
    terminal.shows("10/30 0:0", last=True)  # with the time since the start
    assert terminal.lines[-2] == "ten steps" and "worker.py on localhost: 2 " in "".join(terminal.lines)
    terminal.resize(40)
    terminal.shows("10/30", last=True)
    (tmp_path / "go").touch()
    terminal.shows("name?", last=True)
    terminal.type("Eve\n")
    terminal.shows("20/30", last=True)
    wait_until(lambda: terminal.lines[-2] == "copied 100%", lambda: str(terminal.lines))
    (tmp_path / "further").touch()
    terminal.shows("ended 0")
    assert terminal.lines[-7:-4] == ["ten steps", "name? Eve", "it is Eve"], terminal.lines
    copied, bar, ended, _ = terminal.lines[-4:]
    assert (copied, ended) == ("copied 100%", "ended 0") and "━ 30/30 " in bar, terminal.lines


@pytest.mark.exhaustive
def test_a_run_is_stopped_and_continued_from_the_shell(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        textwrap.dedent(WORKER) + "print('last', flush=True)\nsteps(21, 31)\n"
    )
    terminal.type(f"{COMMAND} worker.py\n")
    terminal.shows("10/30", last=True)
    terminal.type("\x1a")
    terminal.shows("Stopped")
    terminal.shows("shell>", last=True)
    assert not any("/30" in line for line in terminal.lines), terminal.lines
    terminal.type("fg\n")
    terminal.shows("10/30", last=True)
    terminal.type("\x1a")
    terminal.shows("shell>", last=True)
    terminal.type("bg\n")
    (tmp_path / "go").touch()
    terminal.type("wait; echo it is ov''er\n")
    terminal.shows("it is over")
    assert b"last" in terminal.written
    assert not re.search(rb" 2[0-9]/30 ", terminal.written), "no bar beside the shell's prompt"


def test_a_run_in_a_pipe_has_lines_without_codes(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    script = textwrap.dedent(WORKER)
    launch = run(tmp_path, "--no_preload", "--num_gpus=2", script=script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert launch.out.count("step 10/30 loss 1\n") == 1 and launch.out.endswith("ten steps\n"), launch.out
    what, where = launch.err.splitlines()
    assert what == "zlaunch: worker.py on localhost: 2 CPU workers" and where.startswith("zlaunch: logs in ")
    assert "\x1b" not in launch.out + launch.err


def test_verbose_says_how_the_launcher_was_chosen(tmp_path: Path) -> None:
    script = "from zlaunch.runtime.log import detail\ndetail('more of the runtime')"
    launch = run(tmp_path, "-v", "--no_preload", script=script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert "zlaunch: launcher local: no hostfile and no SLURM job\n" in launch.err
    assert "zlaunch: rendezvous at 127.0.0.1:" in launch.err
    assert launch.out == "zlaunch: more of the runtime\n"
