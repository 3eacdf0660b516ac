"""`zlaunch report`: write a page about a run, or about several to compare them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.errors import LaunchError
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant
from zlaunch.ui.run_pages import RunReader
from zlaunch.view.bottleneck import bottleneck_of
from zlaunch.view.page import RunPage, write_page


@click.command(cls=Command, context_settings=SETTINGS, short_help="Write an HTML report of a run.")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="HTML file.  [default: report.html in the run's folder; for several runs, here]",
)
def report(runs: tuple[str, ...], output: str | None) -> int:
    """Write an HTML report of RUN, or compare several RUNs.  [default: last]

    It prints what limits the speed of a step. The page works without a network.
    """
    found = [find_run(meant(name)) for name in runs or ("last",)]
    pages = [_page(run) for run in found]
    folder = found[0].path if len(found) == 1 else Path()
    target = Path(output) if output is not None else folder / "report.html"
    _write(target, write_page(pages))
    for run, page in zip(found, pages, strict=True):
        bottleneck = bottleneck_of(page.progress)
        if page.failure:
            click.echo(f"{run.name}: {page.failure}" if len(found) > 1 else page.failure)
        if bottleneck is not None:
            click.echo(f"{run.name}: {bottleneck.sentence}" if len(found) > 1 else bottleneck.sentence)
    click.echo(str(target))
    return 0


def _page(run: FoundRun) -> RunPage:
    reader = RunReader(run)
    reader.advance()
    return reader.page(run)


def _write(target: Path, text: str) -> None:
    """Write the page; a reader never sees half of it. Raises LaunchError."""
    data = text.encode("utf-8", "backslashreplace")
    target = target.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():  # such as a pipe
            target.write_bytes(data)
            return
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"{target}: cannot write the page: {error.strerror}") from None
