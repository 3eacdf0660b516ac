"""`zlaunch ui`: show the runs of a folder, the queue and sweeps in a browser."""

from __future__ import annotations

import html
import os
import socket
import tempfile
import webbrowser
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.errors import LaunchError
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import DEFAULT_FOLDER


@click.command(cls=Command, context_settings=SETTINGS, short_help="Show runs and the queue in a browser.")
@click.argument("folder", metavar="[DIR]", default=DEFAULT_FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen here.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Listen here.  [default: a free one]",
)
@click.option("--allow_remote", is_flag=True, help="Let --host name an address that other machines reach.")
@click.option("--no_browser", is_flag=True, help="Only print the address.")
def ui(folder: str, host: str, port: int, allow_remote: bool, no_browser: bool) -> int:
    """Show the runs in DIR (default: runs), the queue and sweeps as live web pages.

    The printed address has a token: who has it sees logs, configs and command lines. The pages change
    nothing. Ctrl-C stops the server, not the runs.
    """
    from zlaunch.ui.access import PageAccess, is_loopback
    from zlaunch.ui.board import Board
    from zlaunch.ui.server import check_installed, listen, serve

    check_installed()
    path = Path(folder)
    if run_folder.read(path) is not None:
        raise LaunchError(f"{folder} is one run: zlaunch ui {path.parent} shows its folder")
    if folder != DEFAULT_FOLDER and not path.is_dir():
        raise LaunchError(f"there is no folder {folder!r}")
    if not is_loopback(host) and not allow_remote:
        raise LaunchError(
            f"--host {host}: other machines could connect, without encryption. Add --allow_remote, or keep "
            "127.0.0.1 and forward the port: ssh -L PORT:127.0.0.1:PORT THIS_HOST"
        )
    listener = listen(host, port)
    bound = int(listener.getsockname()[1])
    access = PageAccess(bound, host)
    named = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{named}:{bound}/?token={access.token}"
    click.echo(address)
    if not is_loopback(host):
        click.echo("zlaunch ui: warning: the connection is not encrypted", err=True)
    elif "SSH_CONNECTION" in os.environ:
        forward = f"ssh -L {bound}:127.0.0.1:{bound} {socket.gethostname()}"
        click.echo(f"from your own machine: {forward}, then open the address", err=True)
    with tempfile.TemporaryDirectory(prefix="zlaunch-ui-") as private:
        if not no_browser and any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
            _open_browser(Path(private), address)
        serve(Board(path), access, listener)
    return 0


def _open_browser(private: Path, address: str) -> None:
    """Open the address by way of a file: other users of the machine see a browser's arguments."""
    page = private / "open.html"
    page.touch(mode=0o600)
    page.write_text(f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">')
    webbrowser.open(page.as_uri())
