"""`zlaunch ps`, `stop` and `stacks`: see the runs of a folder, end one, see where its ranks are."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option, seconds_option
from zlaunch.cli.logs import offset_of_last
from zlaunch.cli.short_command import short_commands
from zlaunch.errors import LaunchError
from zlaunch.plan.checks import parse_ranks
from zlaunch.queue.daemon import settle, settle_all
from zlaunch.runtime.trust import Folder
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.found_runs import (
    DEFAULT_FOLDER,
    FoundRun,
    Rank,
    alive,
    check_run_folder,
    find_run,
    find_runs,
    look_into,
    meant,
    newest_of_job,
    own_pids,
    read_ranks,
)
from zlaunch.supervisor.hang import Stand, note_standing, where
from zlaunch.supervisor.run_files import OLDER, TIMES, EventFile, log_path
from zlaunch.supervisor.run_folder import QUEUE_FOLDER, is_locked
from zlaunch.system.messages import NOTHING_SAVES, SaveAsked, StandsStill, decode_worker_event
from zlaunch.system.processes import Process, kill, start_ticks
from zlaunch.view.progress import RunProgress

if TYPE_CHECKING:
    from rich.console import RenderableType


# -- clean ------------------------------------------------------------------------------------------
#
# `zlaunch ps --clean`: remove what runs that have ended have left, and nothing else.


_OURS = (
    "launcher.json",
    "plan.json",
    "events.jsonl",
    "config.effective.json",
    "batches.json",
    "checkpoint.json",
    "provenance.json",
    "packages.txt",
    "git.diff",
    "script_copy*",
    *(f"logs/{folder}rank_*.log{older}" for folder in ("", f"{TIMES}/") for older in ("", OLDER)),
    *("logs/agent_*.log", "logs/error_*.json", CONSOLE_LOG, f"{QUEUE_FOLDER}/[0-9]*.*"),
)
"""What zlaunch writes into a run's folder; all else there is the user's. launcher.json goes last, so that a
folder that could not be emptied stays a run.
"""


def clean_up(runs: Sequence[FoundRun], refused: Mapping[Path, str], *, yes: bool) -> int:
    """List the runs that have ended, ask, and remove them; return the exit code. `refused` runs stay."""
    for path, reason in refused.items():
        print(f"{path}: stays: it {reason}")
    chosen = []
    for run in runs:
        why = _kept_because(run)
        if why is None:
            chosen.append(run)
            print(f"{run.path}: {run.state}, {_size(run.path)}, logs and all")
        elif run.state not in ("running", "queued"):
            print(f"{run.path}: {run.state}, stays: {why}")
    if not chosen:
        print("nothing to remove")
        return 0
    plural = "s" if len(chosen) > 1 else ""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"--clean: add --yes to remove the {len(chosen)} run{plural} listed above")
        if not click.confirm(f"Remove the {len(chosen)} run{plural}?"):
            return 1
    for run in chosen:
        _remove(run)
    print(f"removed {len(chosen)} run{plural}")
    return 0


def _kept_because(run: FoundRun) -> str | None:
    """Return why a run must stay, or None."""
    if run.state == "queued":
        return "it is in the queue"
    if run.record.ended is None:
        if run.is_elsewhere:
            return f"only {run.record.host} can tell whether it has ended: run zlaunch ps --clean there"
        if run.state == "running":
            return "it is going on"
    if is_locked(run.path):
        return "a launch has just begun there"
    if alive := own_pids(run):
        return f"process {alive[0]} of it is still alive"
    job = run_folder.read_json(run.path / run_folder.CHECKPOINT).get("job")
    return f"SLURM job {job} goes on from it if it is requeued; otherwise remove it by hand" if job else None


def _ours(folder: Path) -> list[Path]:
    return [path for pattern in _OURS for path in folder.glob(pattern)]


def _size(folder: Path) -> str:
    size = float(sum(path.lstat().st_size for path in _ours(folder)))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _remove(run: FoundRun) -> None:
    """Remove our files, and the folders that are empty then. Raises click.UsageError."""
    now = run_folder.read(run.path)
    if now is None or now.pid != run.record.pid or now.started != run.record.started:
        print(f"{run.path}: stays: another run has begun there")
        return
    try:
        with Folder(run.path) as folder_checked:
            ours = _ours(folder_checked.path)
            for path in sorted(ours, key=lambda path: path.name == "launcher.json"):
                path.unlink()
        above = run.path.absolute().parent
        group = (above,) if above.name == "runs" or above.name.startswith("slurm-") else ()
        latest = above / "latest"
        for folder in (
            run.path / "logs" / TIMES,
            run.path / "logs",
            run.path / QUEUE_FOLDER,
            run.path,
            *group,
        ):
            if folder == above and latest.is_symlink() and not latest.exists():
                latest.unlink()
            if folder.is_dir() and not folder.is_symlink() and not os.listdir(folder):
                folder.rmdir()
    except OSError as error:
        raise click.UsageError(f"--clean: {error.filename}: {error.strerror}") from None
    if run.path.is_dir():
        others = sorted(path.name for path in run.path.iterdir())
        print(f"{run.path}: {', '.join(others)} stay{'s' * (len(others) == 1)}: not zlaunch's")


# -- runs -------------------------------------------------------------------------------------------


_POLL_S = 0.05
_LEAST_COMMAND = 40
"""Characters of a command in a narrow table."""
_BETWEEN = 3
_EDGES = 4
"""Characters between two columns of the table, and at its edges."""
_QUIET_S = 0.5
"""Seconds without growth after which a log has all of the stacks."""
_STACKS_TIMEOUT_S = 5.0
_STACK_MARK = "(most recent call first):"
_NAMES = {"TERM": "SIGTERM", "INT": "SIGINT", "USR1": "SIGUSR1", "KILL": "SIGKILL"}
_SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "USR1": signal.SIGUSR1, "KILL": signal.SIGKILL}


def _living(text: str, command: str) -> FoundRun:
    """Return a run whose launcher is alive and ours to signal. Raises click.UsageError."""
    run = settle(find_run(text))
    known = run.record
    if run.state == "queued":
        raise click.UsageError(f"{text} is waiting in the queue: remove it with `zlaunch cancel {text}`")
    if known.ended is not None:
        code = f"code {known.exit_code}" + (f" ({known.end.words})" if known.end is not None else "")
        raise click.UsageError(f"{text} has already ended, at {_moment(known.ended)}, {code}")
    if run.is_elsewhere and run.state == "gone":
        raise click.UsageError(f"{text} has already ended: its SLURM job {known.slurm_job} is gone")
    if run.is_elsewhere and known.slurm_job and command == "stop":
        job = _slurm_job(run)
        raise click.UsageError(f"{text} runs on {known.host}: `scancel {job}` ends its SLURM job")
    if run.is_elsewhere:
        program = f"{sys.executable} -m zlaunch"  # whatever the PATH is there
        there = f"{program} {command} {run.path.absolute()}"
        raise click.UsageError(
            f"the launcher of {text} is on {known.host}: ssh {known.host} {there}; "
            f"or, in a SLURM job: srun --overlap --jobid {run.record.slurm_job or 'JOB'} -n1 {there}"
        )
    if known.is_of_other_namespace and run.state == "running":
        raise click.UsageError(
            f"the launcher of {text} is in another container on this host: zlaunch {command} there"
        )
    if not known.is_running():
        raise click.UsageError(f"{text} has already ended: its launcher (process {known.pid}) is gone")
    try:
        os.kill(known.pid, 0)
    except PermissionError:
        raise click.UsageError(f"{text} is another user's run (process {known.pid})") from None
    except OSError:
        pass  # it has just ended
    return run


# -- ps ----------------------------------------------------------------------------------------


@click.command(cls=Command, context_settings=SETTINGS, short_help="List runs, or the ranks of a run.")
@click.argument("folder", metavar="[DIR|RUN]", default=DEFAULT_FOLDER)
@click.option("-a", "--all", "show_all", is_flag=True, help="Show ended runs too.")
@click.option("--clean", is_flag=True, help="List ended runs and remove them with their logs.")
@click.option("-y", "--yes", is_flag=True, help="With --clean, do not ask.")
@click.option("-v", "--verbose", is_flag=True, help="Show whole commands, as in a pipe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; times are seconds since the epoch.")
def ps(folder: str, show_all: bool, clean: bool, yes: bool, verbose: bool, as_json: bool) -> int:
    """List the runs in a folder, or the ranks of a run.  [default: runs]

    `last` means the newest run, and a name of --name the newest run in runs/ with it. You can shorten run
    names. A SLURM job's id, such as 12 or 11_1, means the job's run.

    States: running, ended (with the exit code), gone (the launcher was killed, or its SLURM job has ended),
    on HOST (the launcher is on another host, where you can see more).
    """
    if (yes and not clean) or (clean and (as_json or show_all)):
        raise click.UsageError("--yes needs --clean; --all and --json cannot be combined with it")
    folder = folder if folder == DEFAULT_FOLDER else meant(folder)
    path = Path(folder)
    if not os.path.lexists(path / "launcher.json") and os.path.lexists(
        Path(DEFAULT_FOLDER, folder, "launcher.json")
    ):
        path = Path(DEFAULT_FOLDER, folder)
    known = run_folder.read(path)
    if known is not None:
        run = settle(FoundRun(path.name or str(path), path, known))
        if clean:
            return clean_up([run], {}, yes=yes)
        _show_run(run, read_ranks(run), as_json=as_json)
        return 0
    if os.path.lexists(path / "launcher.json"):
        check_run_folder(path)
        raise click.UsageError(f"{path / 'launcher.json'} cannot be read")
    if not path.is_dir() and folder != DEFAULT_FOLDER:
        raise click.UsageError(f"there is no folder {folder!r}")
    look = look_into(path)
    everything = settle_all(look.runs)
    refused = look.refused
    if clean:
        return clean_up(everything, refused, yes=yes)
    chosen = [run for run in everything if show_all or run.state.startswith(("running", "queued", "on "))]
    if as_json:
        others = [_refused_as_data(path, why, below=Path(folder)) for path, why in refused.items()]
        print(json.dumps([_as_data(run) for run in chosen] + others * show_all, indent=2))
        return 0
    if chosen:
        from zlaunch.cli.tables import make_table, stdout_console

        has_labels = any(run.record.label for run in chosen)
        has_jobs = any(_slurm_job(run) for run in chosen)
        jobs = ("SLURM job",) if has_jobs else ()
        columns = ("run", *(("name",) if has_labels else ()), *_COLUMNS, *jobs)
        rows = [_row(run, has_label=has_labels, has_job=has_jobs) for run in chosen]
        before = [max(map(len, column)) + _BETWEEN for column in zip(columns, *rows, strict=True)]
        commands = [run.record.command for run in chosen]
        whole = [" ".join(words) for words in commands]
        console = stdout_console(pipe_columns=sum(before) + max(map(len, whole)) + _EDGES + _BETWEEN)
        width = max(_LEAST_COMMAND, console.width - sum(before) - _EDGES)
        is_whole = verbose or not sys.stdout.isatty()
        shown = whole if is_whole else short_commands(commands, width)
        cells = [(*row, text) for row, text in zip(rows, shown, strict=True)]
        # the run's name is there to be copied
        console.print(make_table((*columns, "command"), cells, whole=("run",)))
    else:
        ended = f"{len(everything)} {'has' if len(everything) == 1 else 'have'} ended"
        print(f"no run is running in {folder}; {ended}: --all" if everything else f"no runs in {folder}")
    if show_all:
        for path, why in refused.items():
            print(f"{path.relative_to(folder)}: not shown, it {why}")
    elif refused:
        print(f"{len(refused)} run{'s' * (len(refused) > 1)} that other users own or can change: --all")
    return 0


def _as_data(run: FoundRun) -> dict[str, Any]:
    known = asdict(run.record)
    return {"run": run.name, "dir": str(run.path.absolute()), "state": run.state, **known}


def _refused_as_data(path: Path, why: str, *, below: Path) -> dict[str, Any]:
    return {"run": str(path.relative_to(below)), "dir": str(path.absolute()), "state": "refused", "why": why}


_COLUMNS = ("state", "hosts", "workers", "started", "elapsed", "restarts")


def _slurm_job(run: FoundRun) -> str:
    """Return the SLURM job of a run as squeue shows it, or ""."""
    return run.record.slurm_task or run.record.slurm_job


def _row(run: FoundRun, *, has_label: bool, has_job: bool) -> tuple[str, ...]:
    known = run.record
    hosts = tuple(map(known.shown, known.hosts))
    shown = " ".join(hosts) if len(hosts) < 5 else f"{hosts[0]} ... {hosts[-1]} ({len(hosts)})"
    until = known.ended if known.ended is not None else time.time()
    elapsed = "-" if run.state == "gone" else _duration(until - known.started)
    return (
        run.name,
        *([known.label] if has_label else ()),
        run.shown_state,
        shown,
        str(known.world_size),
        _moment(known.started),
        elapsed,
        str(known.attempt),
        *([_slurm_job(run)] if has_job else ()),
    )


def _show_run(run: FoundRun, ranks: Sequence[Rank], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**_as_data(run), "ranks": [asdict(rank) for rank in ranks]}, indent=2))
        return
    from zlaunch.cli.tables import make_table, stdout_console

    rows = [(str(r.rank), run.record.shown(r.host), str(r.pid), r.state) for r in ranks]
    columns = ("rank", "host", "pid", "state")
    called = f" ({run.record.label})" if run.record.label else ""
    number = _slurm_job(run)
    job = f", SLURM job {number}" if number else ""
    title = f"{run.name}{called}: {run.shown_state}{job}"
    stdout_console().print(make_table(columns, rows, title=title))


def _moment(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_s))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


# -- stop --------------------------------------------------------------------------------------


@click.command(cls=Command, context_settings=SETTINGS, short_help="Stop a run and wait until it ends.")
@click.argument("run", metavar="RUN")
@click.option(
    "--signal",
    "name",
    type=click.Choice(list(_SIGNALS), case_sensitive=False),
    help="USR1 asks the script to save and stop. KILL kills the launcher, and the agents stop the workers.  "
    "[default: TERM; INT for a run with --requeue, because TERM requeues it]",
)
@seconds_option("--timeout", "Give up waiting after this many seconds.", default=30.0)
def stop(run: str, name: str | None, timeout: float) -> int:
    """Stop RUN and wait until it ends.

    RUN is a run's name or folder, or `last`. Exit codes: 0 stopped, 1 not ended in time, 2 no running run.
    """
    run = meant(run)
    found = _living(run, "stop")
    process = Process(found.record.pid, found.record.start_ticks)
    chosen = name.upper() if name is not None else "INT" if "--requeue" in found.record.command else "TERM"
    answer = _AnswerToSave(found) if chosen == "USR1" else None
    if found.record.slurm_job and os.environ.get("SLURM_STEP_ID", "").isdecimal():
        # the job ends with its launcher, and SLURM kills this step then
        print(f"{run}: {_NAMES[chosen]} is sent; SLURM may end this command with the job", flush=True)
    kill(process, _SIGNALS[chosen])
    deadline = time.monotonic() + timeout
    while start_ticks(process.pid) == process.start_ticks:
        if answer is not None and answer.is_no():
            print(f"zlaunch stop: warning: {run}: {NOTHING_SAVES}", file=sys.stderr)
            answer = None
        if time.monotonic() >= deadline:
            print(f"zlaunch stop: error: {_not_ended(run, chosen, timeout)}", file=sys.stderr)
            return 1
        time.sleep(_POLL_S)
    after = run_folder.read(found.path)
    if after is None or after.ended is None:
        print(f"{run}: launcher killed; its agents stop the workers")
    else:
        print(f"{run}: stopped, exit code {after.exit_code}")
    return 0


class _AnswerToSave:
    """Reads from a run's events whether its script saves when it is asked to."""

    def __init__(self, run: FoundRun) -> None:
        self._events = EventFile(run.path / "events.jsonl")
        self._acts = False
        self.is_no()  # what was said before the signal

    def is_no(self) -> bool:
        """Tell whether rank 0 has said since the last call that nothing in its process saves."""
        refused = False
        for event in self._events.read():
            if event.get("type") == "save_asked":
                said = decode_worker_event({"rank": None, "host": "", **event})
                if isinstance(said, SaveAsked):
                    self._acts = self._acts or said.acts is True
                    refused = said.acts is not True
        return refused and not self._acts


def _not_ended(run: str, name: str, timeout_s: float) -> str:
    text = f"{run} has not ended within {timeout_s:g} s"
    if name == "KILL":
        return f"{text}: the kernel holds its launcher"
    advice = "--signal TERM asks no script" if name == "USR1" else "a second TERM kills at once"
    return f"{text}: `zlaunch stacks {run}` shows what it is doing, {advice}"


# -- stacks ------------------------------------------------------------------------------------


@click.command(cls=Command, context_settings=SETTINGS, short_help="Print the Python stacks of a run's ranks.")
@click.argument("run", metavar="[RUN]", default="last")
@click.option("--rank", "chosen", metavar="RANKS", help="Ranks to show, such as 0,3-4.  [default: all]")
def stacks(run: str, chosen: str | None) -> int:
    """Print the Python stacks of RUN's ranks while the run continues.  [default: last]

    The first lines group the ranks by where they are and name the collective that they wait in. Exit code 1
    means that the named ranks did not answer.
    """
    run = meant(run)
    found = _living(run, "stacks")
    if not run_folder.read_json(found.path / "plan.json").get("python", True):
        raise click.UsageError(f"{run} was started with --no_python: the program has no Python stacks")
    ranks = {rank.rank: rank for rank in read_ranks(found)}
    if not ranks:
        raise click.UsageError(f"{run} has not started a worker yet")
    wanted = _chosen_ranks(chosen, ranks) if chosen is not None else [r.rank for r in alive(ranks.values())]
    logs = {rank: log_path(found.path, rank) for rank in wanted}
    before = _sizes(logs)
    kill(Process(found.record.pid, found.record.start_ticks), signal.SIGUSR2)
    _await_quiet({rank: log for rank, log in logs.items() if ranks[rank].state == "running"}, before)
    texts = {rank: _read_from(log, before[rank]).decode("utf-8", "replace") for rank, log in logs.items()}
    hosts = {rank: known.host for rank, known in ranks.items()}
    for line in where(texts, _read_standing(found), hosts, wanted):
        print(line)
    print()
    silent = []
    for rank, text in texts.items():
        if text:
            print(f"== rank {rank} on {ranks[rank].host}, process {ranks[rank].pid} ==")
            print(text.rstrip("\n") + "\n")
        if _STACK_MARK not in text:
            silent.append(f"{rank} ({ranks[rank].state})")
    sys.stdout.flush()
    if silent:
        plural = "s" if len(silent) > 1 else ""
        print(f"zlaunch stacks: error: no answer from rank{plural} {', '.join(silent)}", file=sys.stderr)
    return 1 if silent else 0


def _read_standing(run: FoundRun) -> dict[int, Stand]:
    """Read what the ranks of the present attempt that stand still have said."""
    known: dict[int, Stand] = {}
    for event in EventFile(run.path / "events.jsonl").read():
        if event.get("type") == "start":
            known.clear()
        elif event.get("type") == "exit":
            known.pop(event.get("rank", -1), None)
        elif event.get("type") == "standing":
            said = decode_worker_event({"rank": None, "host": "", **event})
            if isinstance(said, StandsStill):
                note_standing(known, said)
    return known


def _chosen_ranks(text: str, known: Collection[int]) -> list[int]:
    """Return the known ranks among those that --rank names. Raises LaunchError."""
    ranks = parse_ranks("--rank", text)
    for rank in (ranks[0], ranks[-1]):
        if rank not in known:
            raise LaunchError(f"--rank {text!r}: there is no rank {rank}; the last is {max(known)}")
    return [rank for rank in ranks if rank in known]


def _await_quiet(logs: dict[int, Path], before: dict[int, int]) -> None:
    """Wait until all logs have grown and then stood still, or a limit has passed."""
    sizes = before
    changed = time.monotonic()
    deadline = changed + _STACKS_TIMEOUT_S
    while (now := time.monotonic()) < deadline:
        new = _sizes(logs)
        if any(new[rank] != sizes[rank] for rank in logs):
            changed = now
        elif now - changed >= _QUIET_S and all(new[rank] > before[rank] for rank in logs):
            return
        sizes = new
        time.sleep(_POLL_S)


def _sizes(logs: dict[int, Path]) -> dict[int, int]:
    """Return the logs' bytes; 0 for a file that is not there."""
    return {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


# -- attach -----------------------------------------------------------------------------------------
#
# `zlaunch attach` and `wait`: see what a detached run shows, and wait for the end of any run.


_ATTACH_POLL_S = 0.1
_ASK_SLURM_S = 2.0
_BLOCK_BYTES = 1 << 16


@click.command(cls=Command, context_settings=SETTINGS, short_help="Show the console of a detached run.")
@click.argument("run", metavar="[RUN]", default="last")
@count_option("-n", "--lines", low=0, default=100, show_default=True, help="Earlier lines to show first.")
def attach(run: str, lines: int) -> int:
    """Show the console of RUN, which was started with --detach, until the run ends.  [default: last]

    Ctrl-C leaves the run alone. The exit code is the run's.
    """
    path = find_run(meant(run)).path / CONSOLE_LOG
    if not path.exists():
        raise click.UsageError(
            f"{run} was not started with --detach: follow its output with `zlaunch logs -f {run}`"
        )
    found = _here(meant(run), "attach")
    try:
        with open(path, "rb") as file:
            file.seek(offset_of_last(path, lines))
            while True:
                has_ended = settle(found.now()).has_ended  # asked first: what comes afterwards is still read
                while block := file.read(_BLOCK_BYTES):
                    sys.stdout.buffer.write(block)
                sys.stdout.flush()
                if has_ended:
                    return _exit_code(found.now())
                time.sleep(_ATTACH_POLL_S)
    except KeyboardInterrupt:
        print(f"\nzlaunch: {found.name} goes on; to end it: zlaunch stop {found.name}", file=sys.stderr)
        return 130


@click.command(
    cls=Command, context_settings=SETTINGS, short_help="Wait until a run ends and exit with its code."
)
@click.argument("run", metavar="[RUN]", default="last")
@seconds_option("--timeout", "Give up after this many seconds, with exit code 124.", low=0)
def wait(run: str, timeout: float | None) -> int:
    """Wait until RUN ends and exit with its exit code.  [default: last]

    RUN may be the id of a SLURM job, also of one that is pending: wait until the job leaves the queue. `last`
    is a job that was submitted from this folder after the newest run.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if run == "last" and (job := _newer_job()):
        print(f"zlaunch wait: SLURM job {job} is newer than the newest run: waiting for it", file=sys.stderr)
        run = job
    if _is_living_batch_job(run):
        return _wait_for_job(run, deadline, timeout)
    found = _here(meant(run), "wait")
    has_warned = False
    while not (now := settle(found.now())).has_ended:
        if now.note and not has_warned:  # nobody will start it
            print(f"zlaunch wait: warning: {run} {now.shown_state}", file=sys.stderr)
            has_warned = True
        if deadline is not None and time.monotonic() >= deadline:
            print(f"zlaunch wait: error: {run} has not ended within {timeout:g} s", file=sys.stderr)
            return 124
        time.sleep(_ATTACH_POLL_S)
    ended = found.now()
    if ended.record.end is not None and ended.record.end.cause == "failed":
        from zlaunch.ui.run_pages import read_failure

        if failure := read_failure(ended):
            print(f"zlaunch: {ended.name}: {failure}", file=sys.stderr)
        report = ended.path / CONSOLE_LOG
        if report.exists():
            print(f"zlaunch: {ended.name}: the whole report is in {os.path.relpath(report)}", file=sys.stderr)
    return _exit_code(ended)


def _newer_job() -> str:
    """Return the job that was submitted in this folder since the newest run in runs/ began; "" for none."""
    from zlaunch.slurm.commands import newest_job_of

    runs = find_runs(Path(DEFAULT_FOLDER))
    return newest_job_of(Path.cwd(), after=runs[-1].record.came if runs else 0.0)


def _is_living_batch_job(text: str) -> bool:
    """Tell whether a word is the id of a living job of sbatch. A job of salloc is a user's shell."""
    from zlaunch.slurm.commands import FINISHED, UNKNOWN, is_batch, job_state

    return (job_state(text) or UNKNOWN) not in FINISHED and is_batch(text)


def _wait_for_job(job: str, deadline: float | None, timeout: float | None) -> int:
    """Wait until a SLURM job has left the queue, also over a requeue. Return the exit code of its last run.

    Raises LaunchError where it has left no run.
    """
    from zlaunch.slurm.commands import FINISHED, describe, state
    from zlaunch.slurm.environment import SlurmError

    found = "PENDING"
    last = ""
    # Between a preemption and the requeue a job looks finished: the second such answer counts.
    while not (found in FINISHED and last in FINISHED):
        if deadline is not None and time.monotonic() >= deadline:
            text = f"SLURM job {job} {describe(job, found)}: it has not ended within {timeout:g} s"
            print(f"zlaunch wait: error: {text}", file=sys.stderr)
            return 124
        time.sleep(_ASK_SLURM_S)
        last = found
        with suppress(SlurmError):  # a busy controller; it is asked again
            found = state(job)
    return _exit_code(newest_of_job(job))


def _here(text: str, command: str) -> FoundRun:
    """Return a run whose end can be seen on this host. Raises click.UsageError."""
    found = settle(find_run(text))
    is_visible = command == "wait" and found.ends_visibly_elsewhere
    if found.record.ended is None and found.is_elsewhere and not found.has_ended and not is_visible:
        job = found.record.slurm_job
        reach = f"srun --overlap --pty --jobid {job} -n1" if job else f"ssh -t {found.record.host}"
        there = f"{reach} {sys.executable} -m zlaunch {command} {found.path.absolute()}"
        raise click.UsageError(f"the launcher of {text} is on {found.record.host}: {there}")
    return found


def _exit_code(found: FoundRun) -> int:
    """Return the exit code of a run that has ended."""
    if (end := found.record.end) is not None:
        if end.cause != "finished":
            words = found.record.why or end.words
            print(f"zlaunch: {found.name}: {words} (exit code {end.code})", file=sys.stderr)
        return end.code
    where = os.path.relpath(found.path)
    print(f"zlaunch: error: {where}: the launcher was killed and wrote no exit code", file=sys.stderr)
    return 1


# -- watch ------------------------------------------------------------------------------------------
#
# `zlaunch watch`: show a run as it stands, until it ends.


_WATCH_POLL_S = 0.5
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
    progress = RunProgress(found.record.shown)
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
            time.sleep(_WATCH_POLL_S)


def _draw(run: FoundRun, progress: RunProgress, height: int) -> RenderableType:
    from zlaunch.view.live import draw

    return draw(progress, run.name, run.now().shown_state, time.time(), height)
