"""Drill the queue: kill its daemon, launchers and workers at random. See tests/drills.py."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.helpers import ROOT, alive
from tests.limits import LIMIT_S, MATRIX_LIMIT_S, wait_until

SLOTS = 4
_SCRIPT = """
    import fcntl, os, sys, time

    def note(what):
        with open("log", "a") as file:
            file.write(f"{os.environ['ZLAUNCH_RUN_ID']} {what} {os.environ['RANK']} {os.getpid()}\\n")

    def take_slot():
        for number in range(int(os.environ["DRILL_SLOTS"])):
            file = open(f"slot.{number}", "w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                file.close()
        note("without")

    slot = take_slot()  # the kernel gives it back, however this process ends
    note("begun")
    seconds, code = float(sys.argv[1]), int(sys.argv[2])
    end = time.time() + seconds
    while time.time() < end and not (seconds > 60 and os.path.exists("go")):
        time.sleep(0.02)
    note("done")
    sys.exit(code)
"""
_FOR_EVER = 3600.0
_NO_ATTEMPT_ENDS = ("daemon", "daemon twice", "daemon at a start", "frozen daemon")
VICTIMS = (
    *_NO_ATTEMPT_ENDS,
    "worker",
    "agent",
    "guard",
    "launcher",
    "launcher and agent",
    "daemon and worker",
    "daemon and launcher",
    "frozen daemon and worker",
    "everything",
    "cancel",
    "daemon, then cancel",
    "cancel, then daemon",
    "SIGTERM",
    "daemon and SIGTERM",
)


@dataclass(frozen=True, slots=True)
class _Job:
    """Describes a job that a drill submits."""

    slots: int
    seconds: float
    code: int
    retries: int

    @property
    def attempts(self) -> int:
        """Return how often it runs if nothing is killed."""
        return 1 + self.retries * (self.code != 0)


@dataclass(frozen=True, slots=True)
class _Drill:
    """Describes one drill. The first job is the victim: it runs until a file is there."""

    number: int
    victim: str
    delay_s: float
    jobs: tuple[_Job, ...]


def _drill(seed: int, number: int) -> _Drill:
    dice = random.Random(f"{seed}.{number}.queue")
    victim = _Job(dice.randint(1, 2), _FOR_EVER, 0, dice.randint(0, 1))
    others = [
        _Job(dice.randint(1, 3), dice.random(), dice.choice((0, 0, 5)), dice.randint(0, 1)) for _ in range(3)
    ]
    return _Drill(number, dice.choice(VICTIMS), dice.random() ** 2, (victim, *others))


def daemons_of(state_home: str) -> list[int]:
    """List the living daemons of the queue in this XDG_STATE_HOME."""
    mark = f"XDG_STATE_HOME={state_home}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            environ = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        if b"zlaunch.queue.daemon" in command and mark in environ.split(b"\0"):
            found.append(int(name))
    return found


class _Scene:
    """A temporary queue and the jobs of one drill."""

    def __init__(self, folder: Path, drill: _Drill) -> None:
        self.folder = folder
        self.drill = drill
        state = folder / "state"
        self.environ = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}
        self.environ["DRILL_SLOTS"] = str(SLOTS)
        (folder / "train.py").write_text(textwrap.dedent(_SCRIPT))
        (folder / "hosts").write_text(f"localhost slots={SLOTS}\n")
        self.run_dirs = [folder / "runs" / f"drill{index}" for index in range(len(drill.jobs))]

    def submit(self) -> None:
        """Submit all jobs from one process."""
        lines = ["from zlaunch.cli.main import main"]
        for job, run_dir in zip(self.drill.jobs, self.run_dirs, strict=True):
            words = ["submit", "--queue=local", "--hostfile=hosts", "--no_local_rank", "--quiet"]
            words += [f"--num_gpus={job.slots}", f"--retries={job.retries}", "--grace=0.5"]
            words += [f"--run_dir={run_dir}", "train.py", str(job.seconds), str(job.code)]
            lines.append(f"assert main({words}) == 0")
        self._python("-c", "\n".join(lines))

    def _python(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self, run_dir: Path) -> int:
        """Return a run's exit code, as `zlaunch wait` has it."""
        done = subprocess.run(
            [sys.executable, "-m", "zlaunch", "wait", str(run_dir)],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=MATRIX_LIMIT_S,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode

    def cancel(self) -> None:
        """Cancel the victim."""
        self._python("-m", "zlaunch", "cancel", "--queue=local", str(self.run_dirs[0]))

    def daemons(self) -> list[int]:
        """List the processes that are this queue's daemon."""
        return daemons_of(self.environ["XDG_STATE_HOME"])

    def signal_daemon(self, signum: int) -> None:
        """Signal the daemon; there may be none."""
        for pid in self.daemons():
            _signal(pid, signum)

    def record(self, run_dir: Path) -> Mapping[str, object]:
        """Return what is in a run's `launcher.json`."""
        content: Mapping[str, object] = json.loads((run_dir / "launcher.json").read_text())
        return content

    def notes(self) -> list[list[str]]:
        """Return what the scripts have noted: run, what, rank, process id."""
        path = self.folder / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> dict[str, int]:
        """Return the processes of the victim: its launcher, agent, guard and last rank."""
        run_id = self.record(self.run_dirs[0])["run_id"]
        run_dir = self.run_dirs[0]
        worker = next(int(pid) for run, what, _, pid in reversed(self.notes()) if run == run_id)
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().split("\n")[:-1]]
        agent = next(int(event["pid"]) for event in events if event["type"] == "agent")
        guard = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        launcher = self.record(run_dir)["pid"]
        assert isinstance(launcher, int)
        return {"launcher": launcher, "agent": agent, "guard": guard, "worker": worker}

    def text(self) -> str:
        """Return what the daemon has said, for a message."""
        logs = [path.read_text() for path in Path(self.folder, "state").rglob("daemon.log")]
        return "".join(logs)[-2000:]


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def _await_end(worker: int) -> None:
    """Wait until a worker has ended. With the file that lets it end by itself, it might finish its job."""

    def has_ended() -> bool:
        try:
            return psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended, f"worker {worker} ends")


_CODES = {"worker": 137, "agent": 137, "guard": 143, "launcher": 137, "everything": 137}
"""Victim -> exit code of the job that is not tried again."""


def _act(scene: _Scene) -> tuple[int, int]:
    """Do it. Return the victim's exit code and how often it runs."""
    victim = scene.drill.victim
    job = scene.drill.jobs[0]
    if victim in _NO_ATTEMPT_ENDS:
        for _ in range(2 if "twice" in victim else 1):
            scene.signal_daemon(signal.SIGSTOP if "frozen" in victim else signal.SIGKILL)
            time.sleep(scene.drill.delay_s)
        scene.signal_daemon(signal.SIGCONT)
        return 0, 1
    if "cancel" in victim:
        if victim.startswith("daemon"):
            scene.signal_daemon(signal.SIGKILL)
        scene.cancel()
        if victim.endswith("daemon"):
            scene.signal_daemon(signal.SIGKILL)
        return 143, 1
    pids = scene.pids()
    if "daemon" in victim or victim == "everything":
        scene.signal_daemon(signal.SIGSTOP if "frozen" in victim else signal.SIGKILL)
    if "SIGTERM" in victim:
        _signal(pids["launcher"], signal.SIGTERM)
        _await_end(pids["worker"])
        return 143, 1
    named = [name for name in pids if name in victim or victim == "everything"]
    for name in named:
        _signal(pids[name], signal.SIGKILL)
    if "frozen" in victim:
        time.sleep(scene.drill.delay_s)
        scene.signal_daemon(signal.SIGCONT)
    _await_end(pids["worker"])
    if job.retries:
        return 0, 2
    return 137 if "launcher" in named else _CODES[named[0]], 1


def queued(seed: int, number: int) -> str:
    """Run one drill on a temporary queue and return its description. Raises AssertionError."""
    drill = _drill(seed, number)
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        scene = _Scene(Path(name), drill)
        try:
            scene.submit()
            if drill.victim == "daemon at a start":
                time.sleep(drill.delay_s)
            else:
                run_id = scene.record(scene.run_dirs[0])["run_id"]
                ranks = {str(rank) for rank in range(drill.jobs[0].slots)}
                wait_until(
                    lambda: {rank for run, _, rank, _ in scene.notes() if run == run_id} == ranks,
                    lambda: f"{drill}: the victim runs: {scene.text()}",
                )
                time.sleep(drill.delay_s)
            code, attempts = _act(scene)
            (scene.folder / "go").touch()
            _check(scene, code, attempts)
        finally:
            scene.signal_daemon(signal.SIGKILL)
            for run_dir in scene.run_dirs:
                if not run_dir.exists():
                    continue
                for pid in alive(str(scene.record(run_dir)["run_id"])):
                    _signal(pid, signal.SIGKILL)
    return f"{drill.number}: queued: {drill.victim}"


def _check(scene: _Scene, code: int, attempts: int) -> None:
    """Check that every job ended as it has to, as often as it has to, and left nothing."""
    drill = scene.drill
    expected = [(code, attempts), *((job.code, job.attempts) for job in drill.jobs[1:])]
    found = [scene.wait(run_dir) for run_dir in scene.run_dirs]
    assert found == [code for code, _ in expected], f"{drill}: exit codes {found}: {scene.text()}"
    run_ids = [str(scene.record(run_dir)["run_id"]) for run_dir in scene.run_dirs]
    left = [alive(run_id) for run_id in run_ids]
    assert not any(left), f"{drill}: left: {left}: {scene.text()}"
    notes = scene.notes()
    assert not [note for note in notes if note[1] == "without"], f"{drill}: too many workers: {scene.text()}"
    # A rank that fails at once stops the others, which may not have noted anything yet.
    counted = Counter((run, rank) for run, what, rank, _ in notes if what == "begun")
    begun = [max(counted[run_id, str(rank)] for rank in range(SLOTS)) for run_id in run_ids]
    assert begun == [count for _, count in expected], f"{drill}: attempts {begun}: {scene.text()}"
    assert "Traceback" not in scene.text(), f"{drill}: {scene.text()}"
    # Two who look may both start one; the second one ends when it finds that the lock is taken.
    wait_until(lambda: len(scene.daemons()) <= 1, lambda: f"{drill}: {scene.daemons()} are daemons")
