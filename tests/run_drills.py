"""Drill runs that are detached, and runs that restart. See tests/drills.py."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import textwrap
import time
from pathlib import Path

from tests.e2e.helpers import Launch, alive, exists
from tests.e2e.test_runs import zlaunch
from tests.limits import wait_until

RANKS = 2
_SCRIPT = """
    import os, subprocess, sys, time
    if "stubborn" in sys.argv:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("log", "a") as file:
        file.write(f"{os.environ['RANK']} {os.getpid()}\\n")
    while not os.path.exists("go"):
        time.sleep(0.02)
"""
_DETACHED = {
    "worker": 137,
    "agent": 137,
    "guard": 143,
    "launcher": 1,
    "launcher and agent": 1,
    "SIGTERM to the launcher": 143,
    "SIGHUP to the launcher": 129,
    "stop": 143,
    "launcher, then stop": 1,
    "who is attached": 0,
}
"""Victim -> exit code of `zlaunch wait`: 1 where the launcher was killed and wrote none."""
_RESTARTED = ("worker", "worker", "two workers", "agent", "guard", "agent and guard", "worker by SIGSEGV")


def _started(folder: Path) -> list[tuple[int, int]]:
    """Rank and process id of all workers that have begun."""
    path = folder / "log"
    if not path.exists():
        return []
    pairs = [line.split() for line in path.read_text().splitlines()]
    return [(int(rank), int(pid)) for rank, pid in pairs]


def _await_attempt(folder: Path, number: int, said: str) -> dict[int, int]:
    """Wait until all ranks of an attempt, from 0, have begun; return their process ids."""
    wait_until(lambda: len(_started(folder)) >= RANKS * (number + 1), lambda: f"attempt {number}: {said}")
    return dict(_started(folder)[-RANKS:])


def _agent_of(run_dir: Path) -> tuple[int, int]:
    """Process ids of the newest agent and its guard."""
    lines = (run_dir / "events.jsonl").read_text().split("\n")[:-1]
    agent = [int(event["pid"]) for event in map(json.loads, lines) if event["type"] == "agent"][-1]
    return agent, int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])


def _kill(*pids: int, by: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, by)
        except ProcessLookupError:
            pass


def detached(seed: int, number: int) -> str:
    """Do one drill on a run without a terminal; return what was done. Raises AssertionError."""
    dice = random.Random(f"{seed}.{number}.detached")
    victim = dice.choice(list(_DETACHED))
    kind = dice.choice(("polite", "stubborn"))
    delay_s = dice.random() ** 2 * 0.5
    what = f"{number}: detached: {victim}, {kind}"
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(textwrap.dedent(_SCRIPT))
        options = ("--detach", f"--num_gpus={RANKS}", "--grace=0.5", "--no_local_rank", "--run_dir=runs/run")
        started = zlaunch(folder, *options, "train.py", kind)
        assert started.returncode == 0, f"{what}: {started.stderr}"
        record = json.loads((folder / "runs" / "run" / "launcher.json").read_text())
        try:
            workers = _await_attempt(folder, 0, what)
            agent, guard = _agent_of(folder / "runs" / "run")
            time.sleep(delay_s)
            if victim == "who is attached":
                attached = Launch(folder, "attach", "runs/run")
                wait_until(lambda: exists(attached.process.pid), "attached")
                time.sleep(delay_s)
                attached.process.kill()
                attached.wait()
                (folder / "go").touch()
            else:
                _hit(
                    victim, {"worker": workers[0], "agent": agent, "guard": guard, "launcher": record["pid"]}
                )
            if victim.endswith("stop"):
                stopped = zlaunch(folder, "stop", "runs/run")
                assert "Traceback" not in stopped.stderr, f"{what}: {stopped.stderr}"
            ended = zlaunch(folder, "wait", "runs/run")
            assert ended.returncode == _DETACHED[victim], f"{what}: {ended.returncode}: {ended.stderr}"
            said = (folder / "runs" / "run" / "console.log").read_text()
            assert "Traceback" not in said, f"{what}: {said}"
            wait_until(
                lambda: not alive(record["run_id"]) and not any(map(exists, (agent, guard))),
                lambda: f"{what}: left: {alive(record['run_id'])}",
            )
            listed = json.loads(zlaunch(folder, "ps", "--all", "--json").stdout)
            state = listed[0]["state"]
            expected = "gone" if ended.returncode == 1 else f"ended {ended.returncode}"
            assert state == expected, f"{what}: {listed}"
        finally:
            _kill(record["pid"], *alive(record["run_id"]))
    return what


def _hit(victim: str, pids: dict[str, int]) -> None:
    if victim.startswith("SIG"):
        _kill(pids["launcher"], by=signal.Signals[victim.split()[0]])
        return
    _kill(*(pid for name, pid in pids.items() if name in victim))


def restarted(seed: int, number: int) -> str:
    """Do one drill on a run that is killed and restarts; return what was done. Raises AssertionError."""
    dice = random.Random(f"{seed}.{number}.restarts")
    kind = dice.choice(("polite", "stubborn"))
    allowed = dice.randint(1, 3)
    kills = [dice.choice(_RESTARTED) for _ in range(dice.randint(1, allowed + 1))]
    pauses = [dice.random() ** 2 * 0.5 for _ in kills]
    what = f"{number}: {len(kills)} kills, {allowed} restarts: {', '.join(kills)}, {kind}"
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        folder = Path(name)
        options = (f"--num_gpus={RANKS}", "--grace=0.5", "--no_local_rank", f"--max_restarts={allowed}")
        launch = Launch(folder, *options, script=_SCRIPT, args=(kind,))
        try:
            killed: set[int] = set()
            for attempt, (victim, pause_s) in enumerate(zip(kills, pauses, strict=True)):
                workers = _await_attempt(folder, attempt, f"{what}: {launch.err}")
                agent, guard = _agent_of(launch.run_dir)
                killed |= {*workers.values(), agent, guard}
                time.sleep(pause_s)
                rank = dice.randrange(RANKS)
                pids = {"agent": agent, "guard": guard}
                pids["two" if victim == "two workers" else "worker"] = workers[rank]
                if victim == "two workers":
                    pids["workers"] = workers[1 - rank]
                by = signal.SIGSEGV if "SEGV" in victim else signal.SIGKILL
                _kill(*(pid for name, pid in pids.items() if name in victim), by=by)
            ends_well = len(kills) <= allowed
            if ends_well:
                _await_attempt(folder, len(kills), f"{what}: {launch.err}")
                (folder / "go").touch()
            code = launch.wait()
            assert (code == 0) == ends_well, f"{what}: exit code {code}: {launch.err}"
            assert "Traceback" not in launch.err, f"{what}: {launch.err}"
            begun = len(_started(folder))
            attempts = len(kills) + ends_well
            assert begun == RANKS * attempts, f"{what}: {begun} workers: {launch.err}"
            run_id = launch.run_id
            wait_until(
                lambda: not alive(run_id) and not any(map(exists, killed)),
                lambda: f"{what}: left: {alive(run_id)}",
            )
        finally:
            launch.process.kill()
            launch.wait()
    return what
