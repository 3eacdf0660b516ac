"""Compare the code and packages of a recorded run with what is there now: for `zlaunch rerun`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zlaunch.runtime.trust import Folder
from zlaunch.supervisor.code_state import DIFF
from zlaunch.supervisor.file_hash import MOST_FILE_BYTES, file_hash
from zlaunch.supervisor.found_runs import DEFAULT_FOLDER
from zlaunch.supervisor.git_state import MOST_DIFF_BYTES, GitState, read_git
from zlaunch.supervisor.provenance import PACKAGES
from zlaunch.supervisor.redact import redact, secret_values
from zlaunch.system.processes import python_module_argv

_ASK_S = 30.0
_SHOWN_HASH = 10
_MOST_NAMED = 3
_BYTECODE = "__pycache__"


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
        is_same = file_hash(Path(path)) == known
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
    elif then.get("diff_is_cut") or now.is_cut:
        yield f"uncommitted changes not compared after the first {MOST_DIFF_BYTES // 1_000_000} MB"
    if now.dirty_submodules:
        yield f"uncommitted changes in submodules not compared: {_some(now.dirty_submodules)}"
    if now.diff is not None:
        yield from _untracked_changes(run_dir, then, now)


def _untracked_changes(run_dir: Path, then: Mapping[str, Any], now: GitState) -> Iterator[str]:
    listed = then.get("untracked")
    hashes = then.get("untracked_sha256")
    hashes = hashes if isinstance(hashes, dict) else {}
    if not isinstance(listed, list):
        listed = []
        why: Any = "the record does not have them"
    else:
        why = now.why or (then.get("why") if not listed else "")
    if why:
        yield f"untracked files not compared: {why}"
        return
    before = _of_code(listed, run_dir, now.root)
    after = _of_code(now.untracked, run_dir, now.root)
    are_cut = ((listed, then.get("untracked_not_listed")), (now.untracked, now.not_listed))
    if cut := [names for names, is_cut in are_cut if is_cut and names]:
        last = min(names[-1] for names in cut)  # others have no names behind it
        before = {name for name in before if name <= last}
        after = {name for name in after if name <= last}
        yield f"untracked files not compared: those after {_shown(last)}"
    both = before & after
    changed = [name for name in both & hashes.keys() if _hash(Path(now.root, name)) != hashes[name]]
    found = (("changed", changed), ("new", after - before), ("gone", before - after))
    if any(names for _, names in found):
        said = "; ".join(f"{what} {_some(names)}" for what, names in found if names)
        yield f"untracked files differ: {said}"
    if unknown := both - hashes.keys():
        yield f"contents of untracked files not compared: {_some(unknown)}"


def _of_code(names: Iterable[str], run_dir: Path, root: str) -> set[str]:
    """Leave out what runs write: their folders, and bytecode."""
    own = [os.path.realpath(folder) for folder in (run_dir, DEFAULT_FOLDER)]
    paths = {name: Path(root, name) for name in names}
    return {
        name
        for name, path in paths.items()
        if path.name != _BYTECODE and not any(path.is_relative_to(folder) for folder in own)
    }


def _hash(path: Path) -> str:
    """Return the hash of a file; empty for one that is not as those that are recorded."""
    try:
        return file_hash(path, MOST_FILE_BYTES)
    except OSError:
        return ""


def _some(names: Iterable[str]) -> str:
    """List up to three names, Python files first, and count the rest."""
    known = sorted(names, key=lambda name: (not name.endswith(".py"), name))
    more = [f"{len(known) - _MOST_NAMED} more"] if len(known) > _MOST_NAMED else []
    return ", ".join([*map(_shown, known[:_MOST_NAMED]), *more])


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)


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
