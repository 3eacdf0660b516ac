"""`zlaunch bundle`: put what an issue needs to say about a run into one archive, without secrets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.errors import LaunchError
from zlaunch.supervisor.bundle import (
    BundledText,
    check_target,
    data_text,
    known_secrets,
    pack,
    run_texts,
    write,
)
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant
from zlaunch.supervisor.redact import redact
from zlaunch.system.checkup import size
from zlaunch.system.environment import describe_environment

_CONTENTS = "contents.txt"
_NAME_CHARACTERS = 100
_LOOK = (
    "look through it before you publish it: a password that a script prints by itself is a word like others"
)


@click.command(
    cls=Command,
    context_settings=SETTINGS,
    short_help="Pack a run's logs and settings for a bug report.",
)
@click.argument("run", metavar="[RUN]", default="last")
@click.option("-o", "--output", metavar="FILE", help="Archive to write.  [default: zlaunch-bundle-ID.tar.gz]")
@click.option("--force", is_flag=True, help="Overwrite an existing archive.")
@click.option("--dry_run", is_flag=True, help="Only list the contents.")
def bundle(run: str, output: str | None, force: bool, dry_run: bool) -> int:
    """Pack logs and settings of RUN into an archive for a bug report.  [default: last]

    zlaunch shortens long logs to their beginning and end. It removes passwords, tokens and keys that it
    recognizes by name, form, or this shell's variables. Names of hosts, users and files stay.
    """
    found = find_run(meant(run))
    name = "zlaunch-bundle-" + re.sub(r"[^A-Za-z0-9_.-]", "_", found.record.run_id)[:_NAME_CHARACTERS]
    path = Path(output or f"{name}.tar.gz")
    if not dry_run:
        check_target(path, force=force)
    texts = _texts(found)
    _show(found, texts)
    if dry_run:
        return 0
    files = {text.name: text.data for text in texts if text.text is not None}
    data = pack(name, files)
    write(path, data)
    print(f"{path}: {size(len(data))}")
    return 0


def _texts(run: FoundRun) -> list[BundledText]:
    """Return all files of the archive, the list of them first."""
    values = known_secrets(run)
    about = "versions, system, memory and GPUs of this machine"
    found = [
        data_text("environment.json", about, describe_environment(os.environ), values),
        _doctor(values),
        *run_texts(run, values),
    ]
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines = [f"run {run.record.run_id}: {run.state}; packed {moment}", ""]
    width = max(len(text.name) for text in found)
    lines += [f"{text.name:<{width}}  {_bytes(text):>9}  {text.what}" for text in found]
    lines += ["", _removed(found)]
    text, _ = redact("\n".join(lines) + "\n", values)
    return [BundledText(_CONTENTS, "this list", text), *found]


def _doctor(values: tuple[str, ...]) -> BundledText:
    from zlaunch.cli.doctor import own_findings

    try:
        return data_text("doctor.json", "`zlaunch doctor --json` of this machine", own_findings(), values)
    except (LaunchError, OSError) as error:
        return BundledText("doctor.json", f"not in it: {error}", None)


def _bytes(text: BundledText) -> str:
    return "-" if text.text is None else str(len(text.data))


def _removed(texts: Sequence[BundledText]) -> str:
    count = sum(text.secrets for text in texts)
    were = f"{count} secrets were" if count != 1 else "1 secret was"
    return f"{were} removed and left as (not shown)"


def _show(run: FoundRun, texts: Sequence[BundledText]) -> None:
    from zlaunch.cli.tables import make_table, stdout_console

    rows = [(text.name, _bytes(text), text.what) for text in texts]
    columns = ("name", "bytes", "what it is")
    console = stdout_console()
    console.print(
        make_table(columns, rows, title=f"{run.name}: {run.state}", right=("bytes",), whole=("name",))
    )
    for line in (_removed(texts), _LOOK):
        console.print(line, markup=False, soft_wrap=True)
