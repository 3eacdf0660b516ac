"""Choose what of a run goes into an archive for an issue, and describe it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zlaunch.errors import LaunchError
from zlaunch.supervisor.found_runs import FoundRun, own_pids
from zlaunch.supervisor.redact import (
    HEAD_BYTES,
    TAIL_BYTES,
    Excerpt,
    as_bytes,
    read_ends,
    read_events,
    read_whole,
    redact,
    redact_json,
    secret_values,
)
from zlaunch.system.events import Event
from zlaunch.system.processes import signal_name

# -- bundle -----------------------------------------------------------------------------------------


MOST_LOGS = 16
"""Logs of ranks that are taken, and of agents."""
_FILES = (
    ("launcher.json", "who runs it, and how it ended"),
    ("plan.json", "what was started where"),
    ("config.effective.json", "the config as the runtime took it"),
    ("checkpoint.json", "where it has saved last"),
)
_RANK = re.compile(r"rank_([0-9]+)\.log")
_AGENT = re.compile(r"agent_([!-~]+)\.log")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class BundledText:
    """Holds one file of the archive, or says why it is not there."""

    name: str
    what: str
    text: str | None
    """None: it is not in the archive, and `what` says why."""
    secrets: int = 0

    @property
    def data(self) -> bytes:
        """Return its bytes; none where it is not in the archive."""
        return b"" if self.text is None else as_bytes(self.text)


def known_secrets(run: FoundRun) -> tuple[str, ...]:
    """Return the secret values of this process, and of the run's own while they are here and alive."""
    found = dict.fromkeys(secret_values(os.environ))
    launcher = [run.record.pid] if run.state == "running" else []
    workers = own_pids(run) if run.record.ended is None else []
    for pid in [*launcher, *workers]:
        try:
            entries = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended, or is another user's
            continue
        pairs = (os.fsdecode(entry).partition("=") for entry in entries)
        found |= dict.fromkeys(secret_values({name: value for name, _, value in pairs}))
    return tuple(found)


def data_text(name: str, what: str, data: Any, values: tuple[str, ...]) -> BundledText:
    """Make a file of the archive of plain data."""
    text, secrets = redact_json(json.dumps(data), values, indent=1)
    return BundledText(name, what, text + "\n", secrets)


def run_texts(run: FoundRun, values: tuple[str, ...]) -> list[BundledText]:
    """Take what the archive has of the run's folder. What cannot be read says why."""
    found = []
    for name, what in _FILES:
        try:
            part = read_whole(run.path, name, values)
            found.append(BundledText(name, what, part.text, part.secrets))
        except OSError as error:
            found.append(_missing(name, error))
    events: Sequence[Event] = ()
    try:
        known = read_events(run.path, "events.jsonl", values)
    except OSError as error:
        found.append(_missing("events.jsonl", error))
    else:
        events = known.events
        part = known.excerpt
        text, secrets = redact(failure_report(events), values)
        found.append(BundledText("failures.txt", "what went wrong, by the events", text, secrets))
        some = f"; {part.left_out} lines of metrics left out" if part.left_out else ""
        found.append(BundledText("events.jsonl", f"events{some}", part.text, part.secrets))
    return [*found, *_logs(run.path, events, values)]


def _missing(name: str, error: OSError) -> BundledText:
    why = "there is none" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    return BundledText(name, f"not in it: {why}", None)


# -- logs --------------------------------------------------------------------------------------


def _logs(folder: Path, events: Sequence[Event], values: tuple[str, ...]) -> list[BundledText]:
    try:
        if not (folder / "logs").resolve().is_relative_to(folder.resolve()):
            return [BundledText("logs", "not in it: it is a link to outside of the run's folder", None)]
        names = os.listdir(folder / "logs")
    except RuntimeError:  # links in a circle
        return [BundledText("logs", "not in it: its links lead nowhere", None)]
    except OSError as error:
        return [_missing("logs", error)]
    ranks = {int(match[1]): name for name in names if (match := _RANK.fullmatch(name))}
    hosts = {match[1]: name for name in names if (match := _AGENT.fullmatch(name))}
    bad_ranks, bad_hosts = _failed(events)
    taken = choose_logs(sorted(ranks), bad_ranks)
    taken_hosts = choose_logs(sorted(hosts), bad_hosts)
    found = [_log(folder, ranks[rank], f"output of rank {rank}", values) for rank in taken]
    if others := sorted(ranks.keys() - taken):
        found.append(BundledText("logs/rank_*.log", f"left out: ranks {_ranges(others)}", None))
    found += [_log(folder, hosts[host], f"the agent on {host}", values) for host in taken_hosts]
    if missing := sorted(hosts.keys() - taken_hosts):
        shown = f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"
        found.append(BundledText("logs/agent_*.log", f"left out: {len(missing)} agents: {shown}", None))
    return found


def _log(folder: Path, name: str, what: str, values: tuple[str, ...]) -> BundledText:
    path = f"logs/{name}"
    try:
        part = read_ends(folder, path, values)
    except OSError as error:
        return _missing(path, error)
    return BundledText(path, f"{what}{_amount(part)}", part.text, part.secrets)


def _amount(part: Excerpt) -> str:
    if not part.left_out:
        return ""
    return f": the first {HEAD_BYTES >> 10} KiB and last {TAIL_BYTES >> 10} KiB of {part.size} bytes"


def choose_logs(ordered: Sequence[_Item], failed: Collection[_Item], most: int = MOST_LOGS) -> list[_Item]:
    """Choose whose logs are taken: the first one's, those that failed, then the first and the last of all."""
    wanted = [*ordered[:1], *(each for each in failed if each in ordered)]
    for index in range((len(ordered) + 1) // 2):
        wanted += [ordered[index], ordered[-1 - index]]
    chosen = list(dict.fromkeys(wanted))[:most]
    return [each for each in ordered if each in chosen]


def _ranges(numbers: Collection[int]) -> str:
    """Write numbers in order as `1-3, 7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


# -- failures ----------------------------------------------------------------------------------


def _failed(events: Iterable[Event]) -> tuple[list[int], list[str]]:
    """Return the ranks and the hosts that went wrong, in that order; those that were told to end did not."""
    ranks: dict[int, None] = {}
    hosts: dict[str, None] = {}
    for event in events:
        kind = event.get("type")
        ended_badly = kind == "exit" and event.get("returncode") != 0 and not event.get("after_stop")
        if kind in ("exception", "error", "lost") or ended_badly:
            if isinstance(rank := event.get("rank"), int):
                ranks[rank] = None
            if isinstance(host := event.get("host"), str):
                hosts[host] = None
    return list(ranks), list(hosts)


def failure_report(events: Iterable[Event]) -> str:
    """Write what went wrong in a run, in the order in which its launcher was told."""
    lines: list[str] = []
    well = 0
    for event in events:
        if event.get("type") == "exit" and event.get("returncode") == 0:
            well += 1
        elif (text := _told(event)) is not None:
            lines.append(f"{_moment(event)}{text}")
            lines += [f"    {line}" for line in str(event.get("traceback", "")).splitlines()]
    return "\n".join([*lines, f"ranks that exited with code 0: {well}"]) + "\n"


def _told(event: Event) -> str | None:
    """Say in a line what an event says of a failure; None where it says nothing."""
    kind = event.get("type")
    host = event.get("host")
    why = event.get("why")
    who = f"rank {event.get('rank')} on {host}"
    if kind == "exit":
        code = event.get("returncode")
        how = f"killed by {signal_name(-code)}" if isinstance(code, int) and code < 0 else f"exit code {code}"
        told = " after it was told to stop" if event.get("after_stop") else ""
        return f"{who}: {how}{told}{_and(', likely reason: ', event.get('reason'))}"
    texts = {
        "start": f"attempt {event.get('attempt')} on {event.get('hosts')}",
        "exception": f"{who}: exception: {event.get('exception')}",
        "error": f"{host}: error: {event.get('message')}",
        "lost": f"{host}: lost: it {why}",
        "stopping": f"{host}: stopping{_and(': ', why)}",
    }
    return texts.get(str(kind))


def _and(joint: str, text: Any) -> str:
    return f"{joint}{text}" if text else ""


def _moment(event: Event) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC  ", time.gmtime(event["time"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return ""  # another program has written into the file


# -- archive ----------------------------------------------------------------------------------------
#
# Write texts as one archive: whole or not at all, and for this user's eyes only.


def pack(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return a .tar.gz of files in one folder. It does not say who has made it."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size = len(data)
            about.mode = 0o600
            about.mtime = int(time.time())
            archive.addfile(about, io.BytesIO(data))
    return whole.getvalue()


def check_target(path: Path, *, force: bool) -> None:
    """Prove that a file may be written there. Raises LaunchError, which names -o and --force."""
    if path.is_dir():
        raise LaunchError(f"{path} is a folder: name a file with -o")
    if not os.path.lexists(path):
        return
    if not force:
        raise LaunchError(f"{path} already exists: name another file with -o, or replace it with --force")
    if not path.is_file():
        raise LaunchError(
            f"{path} is not a regular file, so --force does not replace it: name another one with -o"
        )


def write(path: Path, data: bytes) -> None:
    """Write a file that only this user can read. Raises LaunchError, and leaves nothing then."""
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=".zlaunch-bundle-", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some, or write elsewhere with -o FILE" if full else "write elsewhere with -o FILE"
        raise LaunchError(f"cannot write {path}: {error.strerror or error}: {advice}") from None
    finally:
        if temporary is not None:
            os.unlink(temporary)
