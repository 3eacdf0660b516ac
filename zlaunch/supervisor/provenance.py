"""Record what a run is made of, so that it can be reproduced: its command, code and packages.

Note [Provenance costs nothing]
`provenance.json` is written at the start with what is known then. The rest takes time: git in a large
repository, the metadata of hundreds of packages. It is found out beside the workers, some time after all of
them have been started: git by a process of this launcher (`code_state.py`), packages by the agent of rank 0,
whose interpreter the workers have (`node/package_list.py`). Both have the lowest priority, nothing waits for
them, and the end of the run kills them. The record then says that the run has ended first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zlaunch import __version__
from zlaunch.plan.checks import source_of
from zlaunch.plan.options import Launch, Program
from zlaunch.runtime.trust import Folder
from zlaunch.supervisor.redact import redact, secret_values
from zlaunch.system.messages import Packages
from zlaunch.system.processes import python_module_argv, yield_to_others

PROVENANCE = "provenance.json"
PACKAGES = "packages.txt"
VERSION = 1
"""Raised when a field changes its meaning."""
_AFTER_S = 2.0
"""Seconds between the workers' start and the search for the rest: it must not compete with their imports."""
_MOST_SCRIPT_BYTES = 1_000_000
_ENDED_FIRST = "not recorded: the run ended first"
_SEED = re.compile(r"(?:--?)?((?:[\w.-]*[._-])?seed)(?:=(.+))?", re.IGNORECASE | re.DOTALL)


class Provenance:
    """Writes the record of one run. It never raises, and never waits for anything slow."""

    def __init__(self, launch: Launch, command: Sequence[str]) -> None:
        """Take the launch, and its command line without secrets."""
        self._run_dir = Path(launch.run_dir)
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._unwritten: dict[str, str] = {}
        script = script_of(launch.program, launch.workdir)
        self._text, about = _read_script(script)
        self._code_folder = str(Path(launch.workdir) if script is None else script.parent)
        is_same = launch.python == sys.executable
        self._known: dict[str, Any] = {
            "version": VERSION,
            "run_id": launch.run_id,
            "attempt": launch.first_attempt,
            "time": time.time(),
            "zlaunch": __version__,
            "command": command,
            "cwd": os.getcwd(),
            "workdir": launch.workdir,
            "script": about,
            "seed": find_seed(launch.program.args),
            "python": {
                "executable": launch.python,
                "version": ".".join(map(str, sys.version_info[:3])) if is_same else None,
            },
            "torch": None,
            "git": {"folder": self._code_folder, "why": _ENDED_FIRST},
            "packages": {"why": _ENDED_FIRST},
        }

    def begin(self) -> None:
        """Write what is known at the start."""
        with self._lock:
            self._write()

    def workers_started(self, ask_packages: Callable[[], None]) -> None:
        """Find out the rest soon, if an earlier attempt has not. `ask_packages` asks the agent of rank 0."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._find_rest, args=(ask_packages,), daemon=True)
            self._thread.start()

    def take_packages(self, event: Packages) -> None:
        """Write the list of packages that the agent of rank 0 has sent."""
        lines = event.lines
        values = secret_values(os.environ)
        with self._lock:
            if isinstance(lines, list):
                text, _ = redact("".join(f"{line}\n" for line in lines), values)
                self._put(PACKAGES, text.encode("utf-8", "surrogateescape"))
                self._known["packages"] = {"file": PACKAGES, "count": len(lines)}
                self._known["python"] = {"executable": event.executable, "version": event.python}
                self._known["torch"] = version_in(lines, "torch")
            else:
                self._known["packages"] = {"why": str(event.why or "the agent has sent no list")}
            self._write()

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process that finds out the rest, and that no end of an attempt waits for."""
        helper = self._helper
        return () if helper is None or helper.returncode is not None else (helper.pid,)

    def end(self) -> list[str]:
        """Stop finding out. Return what could not be written, for the user."""
        with self._lock:
            self._ended.set()
            if self._helper is not None and self._helper.poll() is None:
                with suppress(OSError):
                    os.killpg(self._helper.pid, signal.SIGKILL)
            return [f"cannot write {self._run_dir / name}: {why}" for name, why in self._unwritten.items()]

    def _find_rest(self, ask_packages: Callable[[], None]) -> None:
        """Ask for what is missing after a while. A thread runs this."""
        if self._ended.wait(_AFTER_S):
            return
        if self._known["packages"].get("why") == _ENDED_FIRST:
            ask_packages()
        if self._known["git"].get("why") == _ENDED_FIRST:
            self._find_code_state()

    def _find_code_state(self) -> None:
        """Run the helper and note what it says."""
        request = {
            "parent": os.getpid(),
            "run_dir": str(self._run_dir),
            "code_folder": self._code_folder,
            "script": self._text,
        }
        try:
            with self._lock:
                if self._ended.is_set():
                    return
                self._helper = subprocess.Popen(
                    python_module_argv("zlaunch.supervisor.code_state"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                yield_to_others(self._helper.pid)
            said, errors = self._helper.communicate(json.dumps(request).encode())
            found = json.loads(said) if self._helper.returncode == 0 else None
        except (OSError, ValueError) as error:
            said = b""
            errors = str(error).encode()
            found = None
        with self._lock:
            if self._helper is not None and self._helper.returncode == -signal.SIGKILL:
                return  # by the end of the run, or of an attempt
            if not isinstance(found, dict):
                lines = errors.decode("utf-8", "replace").strip().splitlines()
                found = {"git": {"why": lines[-1] if lines else "the process that asks git has failed"}}
            for name, about in found.items():
                self._known[name] |= {"why": "", **about}
            self._write()

    def _write(self) -> None:
        self._put(PROVENANCE, (json.dumps(self._known, indent=1) + "\n").encode())

    def _put(self, name: str, data: bytes) -> None:
        try:
            with Folder(self._run_dir) as folder:
                folder.write(name, data, 0o600)
        except OSError as error:
            self._unwritten[name] = error.strerror or str(error)
        else:
            self._unwritten.pop(name, None)


def script_of(program: Program, workdir: str) -> Path | None:
    """Return the file of the user's program; None for a program that is no script."""
    if program.mode == "module":
        try:
            return source_of(program.name, module=True)
        except (ImportError, ValueError):
            return None
    path = Path(workdir, program.name)
    if path.is_dir():
        return path / "__main__.py"
    if program.mode == "script":
        return path
    try:
        with open(path, "rb") as file:
            return path if file.read(2) == b"#!" else None
    except OSError:
        return None


def _read_script(path: Path | None) -> tuple[dict[str, str] | None, dict[str, Any]]:
    """Return the script for its copy, None for one that is not copied; and what the record has of it."""
    if path is None:
        return None, {"path": None, "why": "the program is not a script"}
    about: dict[str, Any] = {"path": str(path.absolute())}
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_SCRIPT_BYTES + 1)
    except OSError as error:
        return None, {**about, "why": f"cannot be read here: {error.strerror}"}
    if len(data) > _MOST_SCRIPT_BYTES:
        return None, {**about, "why": f"not copied: it has more than {_MOST_SCRIPT_BYTES:,} bytes"}
    about |= {"sha256": hashlib.sha256(data).hexdigest(), "why": f"no copy: {_ENDED_FIRST}"}
    return {"copy": f"script_copy{path.suffix}", "text": data.decode("utf-8", "surrogateescape")}, about


def find_seed(arguments: Sequence[str]) -> str | None:
    """Return the seed that a script's arguments give: `--seed 1`, `seed=1`, else such as `--data_seed 1`."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        match = _SEED.fullmatch(argument)
        if match is None or (match[2] is None and not argument.startswith("-")):
            continue
        value = match[2] if match[2] is not None else "".join(arguments[index + 1 : index + 2])
        if value and not value.startswith("-"):
            found.setdefault(match[1].lower(), value)
    return found.get("seed") or next(iter(found.values()), None)


def version_in(lines: Sequence[str], package: str) -> str | None:
    """Return the version of a package in a list of packages; its source where that is a URL."""
    for line in lines:
        for mark in ("==", " @ "):
            name, found, version = str(line).rpartition(" # ")[2].strip().partition(mark)
            if found and name.lower() == package:
                return version
    return None
