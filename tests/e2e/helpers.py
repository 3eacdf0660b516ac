"""Start real runs and look for what they leave behind, without help from the code under test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.limits import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
# Tests that are run under nohup, or behind an `&` of a script, would hand ignored signals on to every run.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def alive(run_id: str) -> dict[int, str]:
    """The living processes of a run, by the run id in their environment."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", name, "environ").read_bytes()
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if f"ZLAUNCH_RUN_ID={run_id}".encode() in environ.split(b"\0"):
            found[int(name)] = command.decode("utf-8", "replace")
    return found


def exists(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Launch:
    """`python -m zlaunch` in a session of its own; the script is written first."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        script: str = "",
        args: tuple[str, ...] = (),
        env: Mapping[str, str] = {},
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        command = [*prefix, sys.executable, "-m", "zlaunch", f"--run_dir={self.run_dir}", *options]
        if script:
            (folder / "worker.py").write_text(textwrap.dedent(script))
            command += ["worker.py", *args]
        self.out_path, self.err_path = folder / "out", folder / "err"
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                start_new_session=True,
            )

    def wait(self) -> int:
        """The launcher's exit code."""
        return self.process.wait(LIMIT_S)

    @property
    def out(self) -> str:
        """The launcher's stdout so far."""
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        """The launcher's stderr so far."""
        return self.err_path.read_text()

    @property
    def run_id(self) -> str:
        """From the plan on disk."""
        return str(json.loads((self.run_dir / "plan.json").read_text())["run_id"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The logged events of a type; a last line that is being written is left out."""
        try:
            lines = (self.run_dir / "events.jsonl").read_text().split("\n")[:-1]
        except OSError:
            return []
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def agent_pid(self) -> int:
        """The agent's process id."""
        return int(wait_until(lambda: self.events("agent"), "agent started")[0]["pid"])

    def worker_pid(self, rank: int) -> int:
        """A worker's process id."""
        by_rank = wait_until(
            lambda: {e["rank"]: e["pid"] for e in self.events("spawn")}.get(rank), f"rank {rank} started"
        )
        return int(by_rank)

    def log(self, rank: int) -> str:
        """What a rank wrote."""
        return (self.run_dir / "logs" / f"rank_{rank:05d}.log").read_text()

    def log_bytes(self, rank: int) -> bytes:
        """What a rank wrote, untouched."""
        return (self.run_dir / "logs" / f"rank_{rank:05d}.log").read_bytes()


def run(folder: Path, *options: str, **more: Any) -> Launch:
    """A launch that has ended."""
    launch = Launch(folder, *options, **more)
    launch.wait()
    return launch
