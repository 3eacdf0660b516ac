"""Ask git for the state of a folder's repository. Nothing here waits for git for long, or changes anything.

Note [Git without side effects]
git may take a lock on the index, ask for a password, fetch missing objects, and run programs that the
repository's config names (fsmonitor, diff drivers). All of that is switched off, except clean filters:
without them, the diff of a filtered file (git-lfs) would be wrong. git runs in its own session, without a
terminal, and is killed with all that it has started after a time limit. It dies with this process. Call this
in a process with one thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zlaunch.system.processes import die_with_parent

MOST_DIFF_BYTES = 10_000_000
_MOST_UNTRACKED = 1000
_MOST_SAID_BYTES = 1 << 20
_KILL_S = 1.0
_CHUNK_BYTES = 1 << 16
_SETTINGS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_DIFF = (
    "diff",
    "HEAD",
    "--binary",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--submodule=short",
    "-U3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
_DIRTY_SUBMODULE = re.compile(
    rb'^\+\+\+ "?b/([^\n\t]+?)"?\t?\n@@ [^\n]* @@\n'
    rb"(?:-Subproject commit [^\n]*\n)?\+Subproject commit [0-9a-f]+-dirty$",
    re.MULTILINE,
)
_OF_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}


class GitError(Exception):
    """Says why git has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """Holds the state of a repository. `why` names what is not known; the fields for it are empty."""

    root: str = ""
    commit: str = ""
    branch: str = ""
    """Empty for a detached HEAD."""
    diff: bytes | None = None
    """The uncommitted changes of tracked files."""
    is_cut: bool = False
    """Whether the diff has only the first lines."""
    untracked: tuple[str, ...] = ()
    not_listed: int = 0
    """Untracked files and folders beyond those."""
    why: str = ""

    @property
    def diff_hash(self) -> str:
        """Return a hash of the diff; empty where it is not known."""
        return "" if self.diff is None else hashlib.sha256(self.diff).hexdigest()

    @property
    def dirty_submodules(self) -> tuple[str, ...]:
        """Return the submodules with uncommitted changes, which the diff names and does not have."""
        return tuple(os.fsdecode(name) for name in _DIRTY_SUBMODULE.findall(self.diff or b""))


def read_git(folder: Path, timeout_s: float) -> GitState:
    """Read the state of the repository that a folder is in. Never raises."""
    ask = partial(_ask, until=time.monotonic() + timeout_s)
    root = commit = branch = why = ""
    diff: bytes | None = None
    known: tuple[str, ...] = ()
    is_cut = False
    more = 0
    try:
        root = os.fsdecode(ask(folder, "rev-parse", "--show-toplevel")[0].rstrip(b"\n"))
        top = Path(root)
        branch = os.fsdecode(ask(top, "symbolic-ref", "-q", "--short", "HEAD", codes=(0, 1))[0].strip())
        commit = os.fsdecode(ask(top, "rev-parse", "-q", "--verify", "HEAD", codes=(0, 1))[0].strip())
        if not commit:
            raise GitError("the repository has no commit yet")
        diff, is_cut = ask(top, *_DIFF, most=MOST_DIFF_BYTES)
        diff = diff[: diff.rfind(b"\n") + 1]
        listed, _ = ask(top, "ls-files", "--others", "--exclude-standard", "--directory", "-z")
        names = [os.fsdecode(name) for name in listed.split(b"\0")[:-1]]
        known = tuple(names[:_MOST_UNTRACKED])
        more = max(0, len(names) - _MOST_UNTRACKED)
    except GitError as error:
        why = f"git: {error}"
    return GitState(
        root=root,
        commit=commit,
        branch=branch,
        diff=diff,
        is_cut=is_cut,
        untracked=known,
        not_listed=more,
        why=why,
    )


def _ask(
    folder: Path, *words: str, until: float, most: int = _MOST_SAID_BYTES, codes: Sequence[int] = (0,)
) -> tuple[bytes, bool]:
    """Run git; return the first `most` bytes that it prints, and whether it prints more. Raises GitError."""
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    try:
        process = subprocess.Popen(
            ["git", *_SETTINGS, "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, **_QUIET},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except FileNotFoundError:
        raise GitError("it is not installed") from None
    except OSError as error:
        raise GitError(error.strerror or str(error)) from None
    try:
        said, errors, is_cut = _read(process, most, until)
        if not is_cut:
            process.wait(max(0.0, until - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise GitError(f"no answer in time to `git {words[0]}`") from None
    finally:
        _end(process)
    if not is_cut and process.returncode not in codes:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise GitError(lines[0].removeprefix("fatal: ") if lines else f"exit code {process.returncode}")
    return said[:most], is_cut


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill git and what it has started, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with suppress(subprocess.TimeoutExpired):  # the kernel may hold it, such as on a file system that is gone
        process.wait(_KILL_S)


def _read(process: subprocess.Popen[bytes], most: int, until: float) -> tuple[bytes, bytes, bool]:
    """Return git's output, its errors, and whether the output has more than `most` bytes.

    Raises TimeoutError.
    """
    assert process.stdout is not None and process.stderr is not None
    out = process.stdout.fileno()
    err = process.stderr.fileno()
    parts = {out: bytearray(), err: bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in parts:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and len(parts[out]) <= most:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK_BYTES)
                parts[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    return bytes(parts[out]), bytes(parts[err]), len(parts[out]) > most
