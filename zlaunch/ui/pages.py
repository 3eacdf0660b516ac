"""Write the pages: the list of runs, a run or several, the queue and a sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from zlaunch.queue.job_text import JOB_COLUMNS, job_row, run_dir_of
from zlaunch.queue.store import Job
from zlaunch.ui.board import Board, OpenedRun, RunSummary
from zlaunch.ui.html import Html, address, as_text, html, join
from zlaunch.ui.jobs import ShownSweep
from zlaunch.view.page import label, page_body, spark
from zlaunch.view.progress import span

POLL_S = 2.0
"""Seconds between a page's questions for what is new."""
_READING_S = 0.3
"""Seconds between them while events are being read."""
_NOTHING = Html("")

_FRAME = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} · zlaunch</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<link rel="stylesheet" href="/report.css"><link rel="stylesheet" href="/ui.css">
<script src="/live.js" defer></script></head>
<body><header><b>zlaunch</b><nav><a href="/">Runs</a><a href="/queue">Queue and sweeps</a></nav>
<span class="soft" id="standing"></span></header><h1>{title}</h1>{above}
<main data-poll="{poll}">{main}</main></body></html>
"""


@dataclass(frozen=True, slots=True)
class Page:
    """Holds a page: all but `main` stays while the page is open."""

    title: str
    main: Html
    poll_s: float = POLL_S
    """0: nothing new will come."""
    above: Html = _NOTHING
    code: int = 200

    def whole(self) -> str:
        """Return the page's HTML."""
        return html(_FRAME, title=self.title, above=self.above, poll=self.poll_s, main=self.main)


def message_page(text: str, code: int) -> Page:
    """Return a page that says what went wrong."""
    return Page("Not found" if code == 404 else "Error", html("<p>{text}</p>", text=text), code=code)


# -- runs

_COMPARE = Html('<button type="submit">Compare the chosen runs</button>')


def list_page(board: Board, runs: Sequence[RunSummary]) -> Page:
    """Return the list of runs."""
    title = f"Runs in {as_text(str(board.folder))}"
    if not runs:
        hint = "No runs yet. Start one: zlaunch --num_gpus 2 train.py"
        return Page(title, html("<p>{hint}</p>", hint=hint))
    counts = [(state, sum(run.state.startswith(state) for run in runs)) for state in ("running", "queued")]
    text = ", ".join([f"{len(runs)} runs", *(f"{count} {state}" for state, count in counts if count)])
    unread = sum(not run.is_read for run in runs)
    text += f"; reading the events of {unread} more" if unread else ""
    columns = ("", "run", "state", "progress", "loss", "workers", "started", "command")
    head = join(html("<th>{name}</th>", name=name) for name in columns)
    rows = join(_run_row(run) for run in runs)
    main = html(
        '<form action="/compare"><p class="soft">{text} {button}</p>'
        '<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></form>',
        text=text,
        button=_COMPARE,
        head=head,
        rows=rows,
    )
    find = Html('<input id="find" type="search" placeholder="Find a run" aria-label="Find a run">')
    return Page(title, main, _READING_S if unread else POLL_S, find)


def _run_row(run: RunSummary) -> Html:
    if run.state == "broken":
        return html(
            '<tr data-name="{key} broken"><td></td><td>{key}</td><td>'
            '<span class="state bad">broken</span></td><td colspan="5" class="why">{why}</td></tr>',
            key=run.key,
            why=run.why,
        )
    return html(
        '<tr data-name="{key} {label} {state} {command}"><td><input type="checkbox" name="run" value="{key}" '
        'aria-label="Choose {key}"></td><td><a href="{link}">{key}</a>{called}</td><td>{shown}</td>'
        '<td>{progress}</td><td>{loss}</td><td data-label="workers">{workers}</td>'
        '<td data-label="started">{started}</td><td class="command">{command}</td></tr>',
        key=run.key,
        label=run.label,
        called=html('<br><span class="soft">{label}</span>', label=run.label) if run.label else _NOTHING,
        link=address("/run", name=as_text(run.key)),
        state=run.state,
        shown=_state(run.state, run.why),
        progress=_progress(run),
        loss=_loss(run.losses),
        workers=f"{run.workers} on {run.hosts[0]}" if len(run.hosts) == 1 else f"{run.workers}",
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.came)),
        command=run.command,
    )


def _state(state: str, why: str = "") -> Html:
    first = state.split()[0]
    kind = {"running": "good", "queued": "", "on": "good", "done": "", "waiting": ""}.get(first, "bad")
    kind = "" if state == "ended 0" else kind
    return html('<span class="state {kind}" title="{why}">{state}</span>', kind=kind, why=why, state=state)


def _progress(run: RunSummary) -> Html:
    if not run.is_read:
        return Html('<span class="soft">reading</span>')
    if run.step is None:
        return _NOTHING
    if not run.steps:
        return html("step {step}", step=run.step)
    left = f", {span(run.left_s)} left" if run.left_s is not None else ""
    epoch = f" (epoch {run.of_epoch})" if run.of_epoch else ""
    text = html("{step} of {steps}{epoch}{left}", step=run.step, steps=run.steps, epoch=epoch, left=left)
    bar = html('<progress max="{steps}" value="{step}"></progress>', step=run.step, steps=run.steps)
    return html("{bar}<br>{text}", bar=bar, text=text)


def _loss(losses: Sequence[float]) -> Html:
    return html("{curve} {last}", curve=Html(spark(losses)), last=label(losses[-1])) if losses else _NOTHING


def runs_page(opened: Sequence[OpenedRun]) -> Page:
    """Return the page of a run, or of several that are compared."""
    names = [as_text(each.run.name) for each in opened]
    parts = []
    if not all(each.is_read for each in opened):
        parts.append(Html("<p>This is a part: zlaunch is still reading the run's events.</p>"))
    parts.append(Html(page_body([each.page for each in opened])))
    if len(opened) == 1 and opened[0].log:
        log = html("<h3>Last output of rank 0</h3><pre>{text}</pre>", text=opened[0].log)
        parts.append(log)
    if not all(each.is_read for each in opened):
        poll_s = _READING_S
    else:
        poll_s = 0.0 if all(each.run.has_ended for each in opened) else POLL_S
    return Page(" and ".join(names), join(parts), poll_s)


# -- queue and sweeps


def queue_page(board: Board, jobs: Sequence[Job], sweeps: Sequence[str]) -> Page:
    """Return the jobs of the queue and the list of sweeps."""
    parts = [Html("<h2>Queue</h2>")]
    parts.append(_jobs(board, jobs) if jobs else Html("<p>The queue is empty: zlaunch submit fills it.</p>"))
    parts.append(Html("<h2>Sweeps</h2>"))
    if sweeps:
        items = join(
            html('<li><a href="{link}">{name}</a></li>', link=address("/sweep", name=name), name=name)
            for name in sweeps
        )
        parts.append(html("<ul>{items}</ul>", items=items))
    else:
        parts.append(Html("<p>No sweeps: zlaunch sweep starts one.</p>"))
    return Page("Queue and sweeps", join(parts))


def _jobs(board: Board, jobs: Sequence[Job]) -> Html:
    rows = []
    for job in jobs:
        number, name, state, *rest = job_row(job)
        link = address("/run", name=board.shown_as(run_dir_of(job)))
        first = html(
            '<td>{number}</td><td><a href="{link}">{name}</a></td>', number=number, link=link, name=name
        )
        others = [
            html('<td data-label="{column}">{cell}</td>', column=column, cell=cell)
            for column, cell in zip(JOB_COLUMNS[3:], rest, strict=True)
        ]
        rows.append(
            html(
                "<tr>{first}<td>{state}</td>{others}</tr>",
                first=first,
                state=_state(state),
                others=join(others),
            )
        )
    head = join(html("<th>{name}</th>", name=name) for name in JOB_COLUMNS)
    table = '<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return html(table, head=head, rows=join(rows))


def sweep_page(board: Board, sweep: ShownSweep) -> Page:
    """Return the trials of a sweep, the best first."""
    names = list(dict.fromkeys(name for trial in sweep.trials for name in trial.values))
    columns = ("", "trial", "state", *names, sweep.metric, "step")
    rows = []
    for trial in sweep.trials:
        key = board.shown_as(trial.folder)
        cells = [(name, str(trial.values.get(name, ""))) for name in names]
        cells += [
            (sweep.metric, "" if trial.last is None else f"{trial.last:.6g}"),
            ("step", f"{trial.step:g}"),
        ]
        others = join(
            html('<td data-label="{name}">{text}</td>', name=name, text=text) for name, text in cells
        )
        is_there = trial.is_begun and trial.state != "gone"
        box = html('<input type="checkbox" name="run" value="{key}" aria-label="Choose {key}">', key=key)
        shown = html('<a href="{link}">{number}</a>', link=address("/run", name=key), number=trial.number)
        rows.append(
            html(
                "<tr><td>{box}</td><td>{number}</td><td>{state}</td>{others}</tr>",
                box=box if is_there else _NOTHING,
                number=shown if is_there else trial.number,
                state=_state(trial.state),
                others=others,
            )
        )
    main = html(
        '<form action="/compare"><p class="soft">{count} trials, the best first {button}</p>'
        '<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></form>',
        count=len(sweep.trials),
        button=_COMPARE,
        head=join(html("<th>{name}</th>", name=name) for name in columns),
        rows=join(rows),
    )
    has_ended = all(trial.has_ended for trial in sweep.trials)
    return Page(f"Sweep {as_text(sweep.name)}", main, poll_s=0 if has_ended else POLL_S)
