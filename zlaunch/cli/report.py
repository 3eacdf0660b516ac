"""`zlaunch report`: write a page about a run, or about several to compare them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.errors import LaunchError
from zlaunch.supervisor import run_record
from zlaunch.supervisor.event_file import EventFile
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant
from zlaunch.supervisor.redact import redact
from zlaunch.system.events import Event
from zlaunch.view.bottleneck import find_bottleneck
from zlaunch.view.page import RunPage, write_page
from zlaunch.view.progress import RunProgress, span


@click.command(cls=Command, context_settings=SETTINGS, short_help="Write an HTML page about a run.")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The page.  [default: report.html in the folder of the run; of several, here]",
)
def report(runs: tuple[str, ...], output: str | None) -> int:
    """Write one HTML page about RUN, by default the `last`; several RUNs are compared in the same charts.

    Says in one sentence what bounds the step. The page needs no network and holds no secrets that the run's
    own files do not hold.
    """
    found = [find_run(meant(name)) for name in runs or ("last",)]
    pages = [_page(run) for run in found]
    folder = found[0].path if len(found) == 1 else Path()
    target = Path(output) if output is not None else folder / "report.html"
    _write(target, write_page(pages))
    for run, page in zip(found, pages, strict=True):
        hosts = {rank: known.host for rank, known in page.progress.ranks.items()}
        bottleneck = find_bottleneck(page.progress.times(), hosts, page.progress.facts())
        if page.progress.failures:
            last = page.failures[0].strip().splitlines()[-1]
            click.echo(f"{run.name}: {last}" if len(found) > 1 else last)
        if bottleneck is not None:
            click.echo(f"{run.name}: {bottleneck.sentence}" if len(found) > 1 else bottleneck.sentence)
    click.echo(str(target))
    return 0


def _page(run: FoundRun) -> RunPage:
    progress, kept = RunProgress(), []
    for event in EventFile(run.path / "events.jsonl").read():  # one by one: there may be millions
        progress.take(event)
        if event.get("type") in ("exception", "environment"):
            kept.append(event)
    content = run_record.read_json(run.path / "config.effective.json").get("config")
    known = next((event for event in reversed(kept) if event.get("type") == "environment"), {})
    return RunPage(
        run.name,
        _facts(run, progress),
        progress,
        content if isinstance(content, dict) else {},
        _failures(kept, progress),
        {name: value for name, value in known.items() if name not in ("type", "rank", "time")},
    )


def _facts(run: FoundRun, progress: RunProgress) -> list[tuple[str, str]]:
    record = run.record
    end = record.ended or progress.last or record.started
    rows = [
        ("command", shlex.join(("zlaunch", *record.command))),
        ("hosts", ", ".join(record.hosts)),
        ("ranks", str(record.world_size)),
        ("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(progress.started or record.started))),
        ("state", f"{run.state}, after {span(max(0.0, end - (progress.started or record.started)))}"),
    ]
    if progress.step is not None:
        rows.append(("steps", f"{progress.step}" + (f" of {progress.steps}" if progress.steps else "")))
    if progress.checkpoints:
        rows.append(("last checkpoint", progress.checkpoints[-1][1]))
    return rows


def _failures(events: Sequence[Event], progress: RunProgress) -> list[str]:
    """Return tracebacks, lost nodes and other errors."""
    found = [
        redact(f"rank {event.get('rank')} on {event.get('host')}\n{event.get('traceback')}")[0]
        for event in events
        if event.get("type") == "exception"
    ]
    told = tuple(f"rank {event.get('rank')}: " for event in events if event.get("type") == "exception")
    return found + [redact(text)[0] for text in progress.failures if not text.startswith(told)]


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
