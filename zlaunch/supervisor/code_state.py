"""Copy a run's script and git state into its folder: `python -m zlaunch.supervisor.code_state`.

The launcher runs this beside the workers (`provenance.py`) and gives it a request, one JSON object, on stdin.
It prints what it has found, as JSON. It is a process of its own because git may hang, and because secrets are
looked for in up to 10 MB, for seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zlaunch.runtime.trust import Folder
from zlaunch.supervisor.file_hash import hash_files
from zlaunch.supervisor.git_state import MOST_DIFF_BYTES, GitState, read_git
from zlaunch.supervisor.redact import redact, secret_values
from zlaunch.system.processes import die_with_parent

DIFF = "git.diff"
_GIT_S = 60.0
_PRIVATE = 0o600


def main() -> None:
    """Do what the request asks for, and print what is known now."""
    request = json.load(sys.stdin)
    die_with_parent(request["parent"])
    values = secret_values(os.environ)
    found: dict[str, Any] = {}
    with Folder(Path(request["run_dir"])) as folder:
        if request["script"] is not None:
            found["script"] = _copy_script(folder, request["script"], values)
        found["git"] = _write_git(folder, read_git(Path(request["code_folder"]), _GIT_S), values)
    print(json.dumps(found))


def _copy_script(folder: Folder, script: Mapping[str, str], values: Sequence[str]) -> dict[str, Any]:
    text, secrets = redact(script["text"], values)
    try:
        folder.write(script["copy"], text.encode("utf-8", "surrogateescape"), _PRIVATE)
    except OSError as error:
        return {"why": f"cannot write {script['copy']}: {error.strerror}"}
    return {"copy": script["copy"], "secrets": secrets}


def _write_git(folder: Folder, state: GitState, values: Sequence[str]) -> dict[str, Any]:
    """Write the diff, and return what is known of the repository."""
    about: dict[str, Any] = {
        "root": state.root,
        "commit": state.commit,
        "branch": state.branch,
        "dirty": None if state.diff is None else bool(state.diff),
        "why": state.why,
        "untracked": state.untracked,
        "untracked_not_listed": state.not_listed,
        "untracked_sha256": hash_files(Path(state.root), state.untracked),
        "dirty_submodules": state.dirty_submodules,
    }
    if state.diff is None:
        return about
    text, secrets = redact(state.diff.decode("utf-8", "surrogateescape"), values)
    head = "".join(f"# zlaunch: {line}\n" for line in _remarks(state, secrets))
    about |= {"diff_sha256": state.diff_hash, "diff_is_cut": state.is_cut, "secrets": secrets}
    try:
        folder.write(DIFF, (head + text).encode("utf-8", "surrogateescape"), _PRIVATE)
    except OSError as error:
        return {**about, "why": f"cannot write {DIFF}: {error.strerror}"}
    return {**about, "diff": DIFF}


def _remarks(state: GitState, secrets: int) -> Iterator[str]:
    """Yield the lines above the diff, which `git apply` passes over."""
    if state.is_cut:
        yield f"cut after {MOST_DIFF_BYTES // 1_000_000} MB: the rest of the diff is missing"
    if secrets:
        yield f"secrets replaced by (not shown): {secrets}"
    for name in state.dirty_submodules:
        yield f"submodule with uncommitted changes, not in this diff: {name!r}"
    for name in state.untracked:
        yield f"untracked, not in this diff: {name!r}"
    if state.not_listed:
        yield f"and at least {state.not_listed} more untracked"


if __name__ == "__main__":
    main()
