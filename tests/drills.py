"""Kills something of a run at random, again and again, and looks at what is left.

    python -m tests.drills kill [--count 500] [--seed 1] [--parallel 2]      # this machine
    python -m tests.drills queue [--count 100] [--seed 1]                    # the queue, with its daemon
    python -m tests.drills detached [--count 100] [--seed 1]                 # runs without a terminal
    python -m tests.drills restarts [--count 100] [--seed 1]                 # again and again in one run
    python -m tests.drills data [--count 100] [--seed 1]                     # samples, over kills and resumes
    python -m tests.drills cluster [--count 100] [--seed 1]                  # three nodes, by ssh and SLURM
    python -m tests.drills spares [--count 50] [--seed 1]                    # two nodes and a spare, by ssh
    python -m tests.drills launch [--count 1000] [--parallel 2]              # nothing is killed

Every drill hits a run whose workers are up. It asserts that the run ends, with an exit code that fits, that
the report names what was killed, that nothing of it is left, whatever environment, session and parent it has
given itself, and that a bystander lives. The number of a drill and the seed make it what it is: `--only N`
does one again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.helpers import Launch, alive, exists
from tests.limits import wait_until

RANKS = 3
_DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(f"daemon.{os.getpid()}", "w").close()
time.sleep(600)
"""
_READY = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
"""
SCRIPTS = {
    "silent": "open('up.' + rank, 'w').close()\ntime.sleep(600)",
    "busy": "open('up.' + rank, 'w').close()\nwhile True: pass",
    "noisy": "open('up.' + rank, 'w').close()\nwhile True: print('x' * 200, flush=True)",
    "stubborn": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen(['sleep', '600'])\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "open('up.' + rank, 'w').close()\ntime.sleep(600)",
    "daemons": "subprocess.run([sys.executable, '-S', 'daemon.py'], env={})\n"
    "open('up.' + rank, 'w').close()\ntime.sleep(600)",
    "forking": "open('up.' + rank, 'w').close()\n"
    "while True:\n"
    "    if os.fork() == 0:\n        time.sleep(0.02)\n        os._exit(0)\n"
    "    time.sleep(0.005)\n"
    "    try:\n        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
    "    except ChildProcessError: pass",
    "saving": "def save(*_):\n    time.sleep(0.1)\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\n"
    "open('up.' + rank, 'w').close()\ntime.sleep(600)",
    "together": "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "x = torch.ones(8)\ndist.all_reduce(x)\nopen('up.' + rank, 'w').close()\nwhile True: dist.all_reduce(x)",
}
VICTIMS = (
    *("worker", "worker", "worker by SIGSEGV", "two workers", "agent", "guard", "launcher"),
    *("launcher and agent", "agent and guard", "frozen agent, then Ctrl-C", "frozen worker, then Ctrl-C"),
    *("Ctrl-C", "SIGTERM", "SIGHUP", "Ctrl-C twice", "SIGTERM to the agent"),
)


@dataclass(frozen=True, slots=True)
class Drill:
    """What happens in one drill."""

    number: int
    script: str
    victim: str
    rank: int
    delay_s: float
    """After the workers are up."""
    grace_s: float


def drill(seed: int, number: int) -> Drill:
    """Return the drill that a seed and a number make."""
    dice = random.Random(f"{seed}.{number}")
    names = [name for name in SCRIPTS if name != "together"]
    script = "together" if dice.random() < 0.05 else dice.choice(names)
    return Drill(
        number,
        script,
        dice.choice(VICTIMS),
        dice.randrange(RANKS),
        dice.random() ** 2 * 0.5,
        dice.choice((0.2, 0.5)),
    )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _tree(pid: int) -> Iterator[int]:
    todo = [pid]
    while todo:
        yield (one := todo.pop())
        try:
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:
            continue


def _act(what: Drill, launch: Launch, agent: int, guard: int) -> tuple[set[int], str]:
    """Do it; return the exit codes that fit, and words that the report must have."""
    worker = launch.worker_pid(what.rank)
    host = "localhost"
    kills: dict[str, tuple[list[int], int, set[int], str]] = {
        "worker": ([worker], 9, {137}, f"rank {what.rank} on {host} failed first: it was killed by SIGKILL"),
        "worker by SIGSEGV": ([worker], 11, {139}, f"rank {what.rank} on {host} failed first"),
        "two workers": (
            [worker, launch.worker_pid((what.rank + 1) % RANKS)],
            9,
            {137},
            f"on {host} failed first: it was killed by SIGKILL",
        ),
        "agent": ([agent], 9, {137}, f"agent on {host} died (SIGKILL)"),
        "guard": ([guard], 9, {143}, "the agent's watchdog was killed"),
        "launcher": ([launch.process.pid], 9, {-9}, ""),
        "launcher and agent": ([launch.process.pid, agent], 9, {-9}, ""),
        "agent and guard": ([agent, guard], 9, {137}, f"agent on {host} died"),
        "Ctrl-C": ([launch.process.pid], 2, {130}, "stopped by SIGINT"),
        "SIGTERM": ([launch.process.pid], 15, {143}, "stopped by SIGTERM"),
        "SIGHUP": ([launch.process.pid], 1, {129}, "stopped by SIGHUP"),
        "SIGTERM to the agent": ([agent], 15, {143}, "the agent got SIGTERM"),
    }
    if what.victim in kills:
        pids, signum, codes, words = kills[what.victim]
        for pid in pids:
            os.kill(pid, signum)
        return codes, words
    if what.victim.startswith("frozen"):
        os.kill(agent if "agent" in what.victim else worker, signal.SIGSTOP)
    launch.process.send_signal(signal.SIGINT)
    if what.victim == "Ctrl-C twice":
        time.sleep(0.4)
        if launch.process.poll() is None:
            launch.process.send_signal(signal.SIGINT)
        return {130, -2}, ""  # a shell has 130 for both; the second may meet the very end of the process
    return {130}, "stopped by SIGINT"


def local(seed: int, number: int) -> str:
    """Do one drill on this machine; returns what was done, raises AssertionError."""
    what = drill(seed, number)
    bystander = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        folder = Path(name)
        (folder / "daemon.py").write_text(_DAEMON)
        launch = Launch(
            folder,
            f"--num_gpus={RANKS}",
            f"--grace={what.grace_s}",
            "--no_local_rank",
            script=_READY + SCRIPTS[what.script],
        )
        try:
            wait_until(lambda: len(list(folder.glob("up.*"))) == RANKS, lambda: f"up: {launch.err}")
            if what.script == "daemons":
                wait_until(lambda: len(list(folder.glob("daemon.[0-9]*"))) == RANKS, "daemons")
            run_id, agent = launch.run_id, launch.agent_pid()
            guard = _parent(agent)
            tree = set(_tree(guard))
            time.sleep(what.delay_s)
            codes, words = _act(what, launch, agent, guard)
            code = launch.wait()
            assert code in codes, f"{what}: exit code {code}, not {codes}: {launch.err}"
            assert words in launch.err, f"{what}: {words!r} is not in {launch.err!r}"
            assert "Traceback" not in launch.err or what.script == "together", f"{what}: {launch.err}"
            wait_until(
                lambda: not [pid for pid in tree if exists(pid)] and not alive(run_id),
                lambda: f"{what}: left: {[p for p in tree if exists(p)]} {alive(run_id)}",
            )
            assert bystander.poll() is None, f"{what}: somebody else's process was killed"
        finally:
            launch.process.kill()
            launch.wait()
            bystander.kill()
            bystander.wait()
    return f"{what.number}: {what.victim}, {what.script}"


def launched(_seed: int, number: int) -> str:
    """Launch once with nothing killed."""
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        launch = Launch(Path(name), "--num_gpus=2", "-q", script="print('hello')")
        code = launch.wait()
        assert (code, launch.out, launch.err) == (0, "hello\n", ""), (code, launch.out, launch.err)
        assert not alive(launch.run_id)
    return f"{number}: launched"


def many(work: Callable[[int, int], str], seed: int, numbers: range, parallel: int) -> list[str]:
    """Do all of them, some at a time; returns the failures."""
    failed: list[str] = []

    def one(number: int) -> None:
        try:
            print(work(seed, number), flush=True)
        except Exception as error:
            failed.append(f"{number}: {type(error).__name__}: {error}")
            print("FAILED", failed[-1], flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, numbers))
    return failed


def main() -> int:
    """Run the drills of the command line; exit code 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = ("kill", "queue", "detached", "restarts", "data", "launch", "cluster", "spares")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
    if args.kind in ("cluster", "spares"):
        from tests.cluster import drills, spare_drills

        if args.kind == "cluster":
            failed = drills.on_a_testbed(drills.one, args.seed, numbers)
        else:
            failed = drills.on_a_testbed(spare_drills.one, args.seed, numbers, slurm=False)
    else:
        from tests.data_drills import data
        from tests.queue_drills import queued
        from tests.run_drills import detached, restarted

        here = {"kill": local, "queue": queued, "detached": detached, "restarts": restarted, "data": data}
        failed = many(here.get(args.kind, launched), args.seed, numbers, args.parallel)
    print(f"{len(numbers)} drills ({args.kind}) of seed {args.seed}, {len(failed)} failed")
    for text in failed:
        print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
