"""Kill things at random on three nodes, by ssh, by the ssh program and in SLURM jobs. See tests/drills.py."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.helpers import await_ready, pid_of, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch, alive
from tests.limits import FOR_EVER_S, wait_until

_SCRIPTS = {
    "silent": "",
    "stubborn": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\n",
    "hidden": "subprocess.Popen(['sh', '-c', 'sleep 601 &'], env={}, start_new_session=True).wait()\n",
}
_VICTIMS = (
    *("worker", "worker", "agent", "guard", "launcher", "Ctrl-C", "SIGTERM", "SIGTERM to an agent"),
    *("agent and guard", "frozen agent, then Ctrl-C"),
)


def one(cluster: Testbed, seed: int, number: int) -> str:
    """Do one drill; returns what was done, raises AssertionError."""
    dice = random.Random(f"{seed}.{number}.cluster")
    by, script, victim = (
        dice.choice(("ssh", "openssh", "slurm")),
        dice.choice(list(_SCRIPTS)),
        dice.choice(_VICTIMS),
    )
    if victim == "agent and guard" and script == "hidden":
        script = "stubborn"  # nobody is left there who could know what has no mark
    rank, delay_s = dice.randrange(6), dice.random() ** 2 * 0.5
    what = f"{number}: {victim}, {script}, {by}, rank {rank}"
    body = (
        "import os, signal, subprocess, time\n"
        + _SCRIPTS[script]
        + "print('ready', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
    )
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        options = ["--grace=0.5", f"--heartbeat={FOR_EVER_S}"]
        options += ["--launcher=openssh"] if by == "openssh" else []
        launch = start(cluster, Path(name), *options, by="slurm" if by == "slurm" else "ssh", script=body)
        try:
            await_ready(launch)
            run_id = launch.run_id
            time.sleep(delay_s)
            code, words = _act(cluster, launch, victim, rank, by)
            found = launch.wait()
            # salloc has codes of its own, 0 among them when its command is killed.
            fits = found == code or (by == "slurm" and (found or victim == "launcher"))
            assert fits, f"{what}: exit code {found}: {launch.err}"
            assert words in launch.err, f"{what}: {words!r} is not in {launch.err!r}"
            wait_until(lambda: not cluster.processes(), lambda: f"{what}: left: {cluster.processes()}")
            wait_until(lambda: not alive(run_id), lambda: f"{what}: left: {alive(run_id)}")
        finally:
            launch.process.kill()
            launch.wait()
            cluster.cancel_jobs()
            cluster.kill_processes()
    return what


def _act(cluster: Testbed, launch: Launch, victim: str, rank: int, by: str) -> tuple[int, str]:
    host, worker = pid_of(launch, rank)
    agent = int(next(e for e in launch.events("agent") if e["host"] == host)["pid"])
    guard = cluster.enter(host, "ps", "-o", "ppid=", "-p", str(agent)).stdout.strip()
    # Under salloc the launcher is its child.
    launcher = launch.process.pid
    if by == "slurm":
        launcher = int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])

    def on_node(signum: str, *pids: str | int) -> None:
        cluster.enter(host, "kill", f"-{signum}", *map(str, pids))

    if victim == "worker":
        on_node("KILL", worker)
        return 137, f"rank {rank} on {host} failed first: it was killed by SIGKILL"
    if victim == "agent":
        on_node("KILL", agent)
        return 1, f"agent on {host} died"
    if victim == "guard":
        on_node("KILL", guard)
        return (
            143,
            f"the run on {host} was stopped: the agent's watchdog was killed" if by != "slurm" else host,
        )
    if victim == "agent and guard":
        on_node("KILL", agent, guard)
        return 1, f"agent on {host} died"
    if victim == "SIGTERM to an agent":
        on_node("TERM", agent)
        return 143, f"the run on {host} was stopped: the agent got SIGTERM"
    if victim == "launcher":
        os.kill(launcher, signal.SIGKILL)
        return -9, ""
    if victim.startswith("frozen"):
        on_node("STOP", agent)
    signum = signal.SIGTERM if victim == "SIGTERM" else signal.SIGINT
    os.kill(launcher, signum)
    return 128 + signum, f"stopped by {signum.name}"


def on_a_testbed(
    one: Callable[[Testbed, int, int], str], seed: int, numbers: range, *, slurm: bool = True
) -> list[str]:
    """Run drills of one kind on a temporary testbed and return the failures."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="ztest-") as folder:
        bed = Testbed(Path(folder) / "bed", slurm=slurm)
        bed.up()
        try:
            for number in numbers:
                try:
                    print(one(bed, seed, number), flush=True)
                except Exception as error:
                    failed.append(f"{number}: {type(error).__name__}: {error}")
                    print("FAILED", failed[-1], flush=True)
        finally:
            bed.down()
    return failed
