"""Test `zlaunch watch` in a pipe and in a terminal, and the page of `zlaunch report` in a browser."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, run
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, wait_until
from tests.programs import chromium

TRAIN = """
    import os, sys, time, torch, zlaunch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": float(sys.argv[1])}},
        "zero_optimization": {"stage": 2},
    })
    zlaunch.report(step=0, steps=20, val_loss=3.0)
    ids = torch.arange(32).view(4, 8) % 16
    for step in range(20):
        loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
        time.sleep(0.06)
        while len(sys.argv) > 2 and step == 10 and not os.path.exists(sys.argv[2]):
            time.sleep(0.05)
    zlaunch.report(step=20, val_loss=1.0)
    print("trained", flush=True)
    if len(sys.argv) > 2:
        raise ValueError("<script>alert('planted')</script>")
"""


def watch_in_a_terminal(folder: Path, go: Path) -> str:
    """Watch a run that goes on as soon as it is seen, to its end; return what was drawn."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    watcher = subprocess.Popen(
        [sys.executable, "-m", "zlaunch", "watch", "run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    seen = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(controller, 4096):
                seen.extend(chunk)
        except OSError:  # the terminal's other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: b"running" in seen and b" of 20" in seen, lambda: f"a picture, not {bytes(seen)!r}")
    assert watcher.poll() is None
    go.touch()
    assert watcher.wait(LIMIT_S) == 0
    reader.join(LIMIT_S)
    return seen.decode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `good/run` has ended well, `bad/run` with an exception, watched: `seen`."""
    folder = tmp_path_factory.mktemp("runs")
    options = ("--num_gpus=2", "--no_local_rank")
    for name in ("good", "bad"):
        (folder / name).mkdir()
    good = run(folder / "good", *options, script=TRAIN, args=("0.1",))
    assert good.process.returncode == 0, good.err
    bad = Launch(folder / "bad", *options, script=TRAIN, args=("0.001", "go"))
    wait_until((folder / "bad" / "run" / "launcher.json").exists, "a run")
    (folder / "seen").write_text(watch_in_a_terminal(folder / "bad", folder / "bad" / "go"))
    assert bad.wait() == 1, bad.err
    return folder


@pytest.mark.exhaustive
def test_watch_in_a_terminal(runs: Path) -> None:
    text = (runs / "seen").read_text()
    assert "ended 1" in text and "ValueError" in text and "Traceback" not in text


@pytest.mark.exhaustive
def test_watch_in_a_pipe(runs: Path) -> None:
    shown = zlaunch(runs, "watch", "good/run")
    assert shown.returncode == 0, shown.stderr
    first, *lines = shown.stdout.splitlines()
    assert first.startswith("good/run · ended 0 · ") and first.endswith(" · step 20 of 20")
    assert any(re.match(r"loss [▁▂▃▄▅▆▇█]+ ", line) for line in lines)
    rows = [line.split() for line in lines if " localhost " in line]
    assert [row[:3] for row in rows] == [["0", "localhost", "done"], ["1", "localhost", "done"]]
    assert any("bounds the step" in line for line in lines)
    bad = zlaunch(runs, "watch", "bad/run").stdout
    assert "ended 1" in bad and "ValueError: <script>" in bad


@pytest.mark.rotated
def test_mistakes(tmp_path: Path) -> None:
    for command in ("watch", "report"):
        done = zlaunch(tmp_path, command, "nothing")
        assert done.returncode == 2 and "no run 'nothing'" in done.stderr
    launch = run(tmp_path, script="print(1)")
    assert launch.process.returncode == 0
    done = zlaunch(tmp_path, "report", "run", "-o", "no/such/folder.html")
    assert done.returncode == 2 and "no/such/folder.html: cannot write the page" in done.stderr
    assert zlaunch(tmp_path, "watch", "run").returncode == 0
    page = zlaunch(tmp_path, "report", "run")
    assert (page.returncode, page.stdout) == (0, "run/report.html\n")
    assert "no step has been reported" in (tmp_path / "run" / "report.html").read_text()


class _Outside(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object"):
            self.found.append(tag)
        self.found += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]


@pytest.mark.rotated
def test_the_page_is_whole_and_alone(runs: Path) -> None:
    done = zlaunch(runs, "report", "bad/run", "-o", "bad.html")
    assert done.returncode == 0, done.stderr
    page = (runs / "bad.html").read_text()
    outside = _Outside()
    outside.feed(page)
    assert not outside.found and "url(" not in page and "@import" not in page
    assert "&lt;script&gt;alert(" in page and "Traceback (most recent call last)" in page
    for part in (
        "<h3>Loss</h3>",
        "<h3>Speed</h3>",
        "<h3>Learning rate</h3>",
        "<h3>Memory of a rank, GB</h3>",
    ):
        assert part in page
    assert "val_loss" in page and "train_micro_batch_size_per_gpu" in page
    assert "exit 1" in page or "SIGTERM" in page  # a machine under load may stop it before it has exited
    assert re.search(r"torch&quot;: &quot;\d", page)


@pytest.mark.rotated
@pytest.mark.needs("chromium")
def test_the_page_in_a_browser(runs: Path) -> None:
    done = zlaunch(runs, "report", "good/run", "bad/run", "-o", "both.html")
    assert done.returncode == 0 and done.stdout.count("bounds the step") == 2, done.stderr

    def browse(*arguments: str) -> str:
        command = [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,2200"]
        with_own_folder = [f"--user-data-dir={runs / 'browser'}", *arguments]
        shown = subprocess.run(
            [*command, *with_own_folder, (runs / "both.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    page = browse("--dump-dom")
    assert page.count("<svg") >= 6 and page.count("<polyline") >= 12 and "good/run: val_loss" in page
    picture = runs / "page.png"
    browse(f"--screenshot={picture}")
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">II", header[16:24]) == (1300, 2200)
    colors = _colors(picture)
    assert {(0x2F, 0x6F, 0xDE), (0xD9, 0x58, 0x0D)} <= colors, "the curves of both runs are drawn"


def _colors(picture: Path) -> set[tuple[int, int, int]]:
    from PIL import Image

    with Image.open(picture) as image:
        found = image.convert("RGB").getcolors(1 << 24) or []
    return {color for _, color in found if isinstance(color, tuple)}
