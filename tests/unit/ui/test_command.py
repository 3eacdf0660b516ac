"""Test what `zlaunch ui` refuses, and what it opens."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from tests.unit.ui.folders import write_run
from zlaunch.cli.main import main
from zlaunch.ui import server


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(board: object, access: object, listener: socket.socket) -> None:
        listener.close()

    monkeypatch.setattr(server, "serve", serve)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that refuses a command line."""
    assert main(["ui", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("zlaunch ui: error: ") and err.count("\n") == 1
    return err


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one")
    assert "there is no folder 'nothing'" in refused(capsys, "nothing")
    assert "runs/one is one run: zlaunch ui runs" in refused(capsys, "runs/one")
    for host in ("0.0.0.0", "::", "10.0.0.7"):
        text = refused(capsys, "--host", host)
        assert f"--host {host}" in text and "--allow_remote" in text and "ssh -L" in text
    assert "cannot listen at no.such.host.invalid" in refused(
        capsys, "--host", "no.such.host.invalid", "--allow-remote"
    )


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(capsys, "--port", str(port))
    assert f"port {port}: Address already in use; --port 0 takes a free port" in text


def test_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object | None:
        return None if name == "uvicorn" else importlib.util.find_spec(name)

    monkeypatch.setattr(server, "find_spec", find)
    assert "zlaunch ui needs uvicorn: pip install 'zlaunch[ui]'" in refused(capsys)


def test_the_browser_gets_no_token_on_its_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str, int]] = []

    def note(address: str) -> bool:
        page = Path(address.removeprefix("file://"))
        opened.append((address, page.read_text(), page.stat().st_mode & 0o777))
        return True

    monkeypatch.setattr("webbrowser.open", note)
    assert main(["ui"]) == 0 and not opened, "without a display it would be a browser in the terminal"
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["ui", "--no_browser"]) == 0 and not opened
    assert main(["ui"]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    [(address, text, mode)] = opened
    token = printed.partition("token=")[2]
    assert token not in address and printed in text and mode == 0o600
    assert not Path(address.removeprefix("file://")).exists(), "it is removed at the end"
