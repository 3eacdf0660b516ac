"""Test `zlaunch ui`: the server as a process, and its pages in a browser."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S
from tests.programs import chromium
from tests.unit.ui.folders import STARTED, write_run

RUNS = 200
GROWING = """
import sys
from pathlib import Path
from tests.unit.ui.folders import append, reported
from zlaunch.ui.access import PageAccess
from zlaunch.ui.board import Board
from zlaunch.ui.server import listen, serve

class Growing(Board):
    "A run of which every answer knows a step more."
    def runs(self):
        self.steps = getattr(self, "steps", 3) + 1
        append(self.folder / "run", reported(self.steps, 1000))
        return super().runs()

listener = listen("127.0.0.1", 0)
access = PageAccess(listener.getsockname()[1])
print(f"http://127.0.0.1:{access.port}/?token={access.token}", flush=True)
serve(Growing(Path("runs")), access, listener)
"""


class Server:
    """A server in a folder, and the address that it has printed."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def stop(self, signum: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        """Return the exit code and what was printed after the address."""
        self.process.send_signal(signum)
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def browse(self, path: str, *arguments: str) -> str:
        """Return what Chromium prints of a page; it keeps the cookie of an earlier call."""
        where = self.address.replace("/?", f"{path}{'&' if '?' in path else '?'}")
        command = [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        shown = subprocess.run(
            [*command, f"--user-data-dir={self.folder / 'browser'}", *arguments, where],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for a folder with 200 runs, and a broken one."""
    folder = tmp_path_factory.mktemp("ui")
    for number in range(RUNS):
        write_run(
            folder / "runs", f"run-{number:03d}", steps=40, started=STARTED + number, log="<b>loss</b>\n"
        )
    (folder / "runs" / "broken").mkdir()
    (folder / "runs" / "broken" / "launcher.json").write_text("{")
    server = Server(folder, "-m", "zlaunch", "ui", "--no_browser")
    yield server
    server.stop()


def test_the_server(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one")
    server = Server(tmp_path, "-m", "zlaunch", "ui", "--no-browser")
    bare, token = server.address.split("?token=")
    assert bare.startswith("http://127.0.0.1:") and token
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(bare, timeout=LIMIT_S)
    asked = urllib.request.Request(bare, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked, timeout=LIMIT_S)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(server.address, timeout=LIMIT_S) as answer:
        assert answer.url == bare and b"/run?name=one" in answer.read()
    assert server.stop() == (0, "", ""), "Ctrl-C ends it quietly"


@pytest.mark.rotated
@pytest.mark.needs("chromium")
def test_a_page_follows_its_runs(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs", "run", steps=3)
    server = Server(tmp_path, "-c", GROWING)
    try:
        page = server.browse("/", "--dump-dom", "--virtual-time-budget=20000")
    finally:
        server.stop()
    first = f'<progress max="1000" value="{4}"></progress>'
    assert "<progress" in page and first not in page and ">4 of 1000" not in page
    assert (path / "events.jsonl").read_text().count("metrics") > 4


@pytest.mark.needs("chromium")
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1280, 390])
def test_screenshots_of_200_runs(many: Server, width: int) -> None:
    picture = many.folder / f"list-{width}.png"
    many.browse("/", f"--window-size={width},900", f"--screenshot={picture}")
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">II", header[16:24]) == (width, 900)
    page = many.browse("/", f"--window-size={width},900", "--dump-dom", "--virtual-time-budget=60000")
    assert page.count('<svg class="spark"') == RUNS and "its launcher.json cannot be read" in page
    shown = many.browse("/run?name=run-007", f"--window-size={width},900", "--dump-dom")
    assert "<polyline" in shown and "&lt;b&gt;loss&lt;/b&gt;" in shown
