"""Compare the code and packages of a recorded run with what is there now: for `zlaunch rerun`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zlaunch.runtime.trust import Folder
from zlaunch.supervisor.code_state import DIFF
from zlaunch.supervisor.git_state import read_git
from zlaunch.supervisor.provenance import PACKAGES, script_hash
from zlaunch.supervisor.redact import redact, secret_values
from zlaunch.system.processes import python_module_argv

_ASK_S = 30.0
_SHOWN_HASH = 10
_MOST_NAMED = 3


def find_changes(run_dir: Path, known: Mapping[str, Any], python: str) -> Iterator[str]:
    """Yield a line for each thing that is not as the run's record (`provenance.json`) has it, or that cannot
    be compared. `python` is the interpreter of the workers.
    """
    yield from _script_changes(run_dir, _part(known, "script"))
    yield from _git_changes(run_dir, _part(known, "git"))
    yield from _package_changes(run_dir, _part(known, "packages"), python)


def _part(known: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = known.get(name)
    return part if isinstance(part, dict) else {"why": "the record does not have it"}


def _script_changes(run_dir: Path, then: Mapping[str, Any]) -> Iterator[str]:
    path = then.get("path")
    known = then.get("sha256")
    if not path:
        return  # a program that is no script
    if not known:
        yield f"script not compared: {then.get('why')}"
        return
    try:
        is_same = script_hash(Path(path)) == known
    except OSError as error:
        yield f"script not compared: {path}: {error.strerror}"
        return
    if not is_same:
        copy = f"; its copy is {run_dir / str(then['copy'])}" if then.get("copy") else ""
        yield f"the script {path} has changed since the run{copy}"


def _git_changes(run_dir: Path, then: Mapping[str, Any]) -> Iterator[str]:
    now = read_git(Path(str(then.get("folder") or ".")), _ASK_S)
    if then.get("why") == now.why != "":
        return  # as before: there is no repository
    for why in (None if then.get("commit") else then.get("why"), now.why if not now.commit else ""):
        if why:
            yield f"git state not compared: {why}"
            return
    if then.get("commit") != now.commit:
        before = str(then.get("commit"))[:_SHOWN_HASH]
        after = now.commit[:_SHOWN_HASH]
        yield f"the git commit is {after} and was {before}"
    if not then.get("diff_sha256") or now.diff is None:
        yield f"uncommitted changes not compared: {then.get('why') or now.why}"
    elif then["diff_sha256"] != now.diff_hash:
        yield f"the uncommitted changes differ from {run_dir / DIFF}"


def _package_changes(run_dir: Path, then: Mapping[str, Any], python: str) -> Iterator[str]:
    try:
        with Folder(run_dir) as folder:
            before = (folder.path / PACKAGES).read_text(errors="surrogateescape").splitlines()
    except OSError as error:
        yield f"packages not compared: {then.get('why') or error.strerror}"
        return
    try:
        found = json.loads(_list_with(python))["lines"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        yield f"packages not compared: {python} cannot list them here"
        return
    text, _ = redact("".join(f"{line}\n" for line in found), secret_values(os.environ))
    old = _by_name(before)
    new = _by_name(text.splitlines())
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        shown = [f"{name} {new.get(name, 'is missing')}, was {old.get(name, 'missing')}" for name in names]
        more = [f"{len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
        yield f"packages differ: {'; '.join([*shown[:_MOST_NAMED], *more])}"


def _list_with(python: str) -> bytes:
    """Return what an interpreter says of its packages. Raises OSError and subprocess.SubprocessError."""
    command = python_module_argv("zlaunch.node.packages")
    if python != sys.executable:
        command = (python, "-m", command[-1])
    null = subprocess.DEVNULL
    command = (*command, str(os.getpid()))
    return subprocess.run(command, stdin=null, capture_output=True, check=True, timeout=_ASK_S).stdout


def _by_name(lines: Sequence[str]) -> dict[str, str]:
    """Return the version, or the source, of each package of a list."""
    found = {}
    for line in lines:
        if line.startswith("-e "):
            source, _, named = line.rpartition("  # ")
            found[named.partition("==")[0]] = source
        elif " @ " in line:
            name, _, found_at = line.partition(" @ ")
            found[name] = found_at
        elif "==" in line:
            name, _, version = line.partition("==")
            found[name] = version
    return found
