"""`zlaunch watch`: show a run as it stands, until it ends."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.queue.ending import settle
from zlaunch.supervisor.event_file import EventFile
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant
from zlaunch.view.progress import RunProgress

if TYPE_CHECKING:
    from rich.console import RenderableType

_POLL_S = 0.5
_MANY = 1000
"""Lines of a picture that is no screen."""


@click.command(cls=Command, context_settings=SETTINGS, short_help="Show a run's progress until it ends.")
@click.argument("run", metavar="[RUN]", default="last")
@click.option("--once", is_flag=True, help="Print the progress once.")
def watch(run: str, once: bool) -> int:
    """Show progress, loss, speed, step times and ranks of RUN.  [default: last]

    Ctrl-C does not stop the run. From another machine, use ssh -t HOST zlaunch watch RUN.
    """
    from rich.console import Console
    from rich.live import Live

    found = find_run(meant(run))
    events = EventFile(found.path / "events.jsonl")
    progress = RunProgress()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if once or not console.is_terminal or found.state.startswith(("ended", "gone")):
        progress.take_all(events.read())
        console.print(_draw(found, progress, _MANY))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = settle(found.now()).state  # asked first: what comes afterwards is still read
            progress.take_all(events.read())
            live.update(_draw(found, progress, console.height), refresh=True)
            if state.startswith(("ended", "gone")):
                return 0
            time.sleep(_POLL_S)


def _draw(run: FoundRun, progress: RunProgress, height: int) -> RenderableType:
    from zlaunch.view.live import draw

    return draw(progress, run.name, run.now().shown_state, time.time(), height)
