"""Lose a worker or a node of two at random, with a third node as the spare. See tests/drills.py.

The nodes are namespaces of one kernel and share a folder, so a lock on a file shows whether a rank is there
twice.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch
from tests.limits import wait_until

_VICTIMS = ("worker", "agent", "guard", "agent and guard", "cut", "reboot", "power loss", "frozen agent")
_SCRIPT = """
    import fcntl, os, signal, sys, time
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, attempt = os.environ["RANK"], os.environ["ZLAUNCH_RESTART_COUNT"]
    lock = open("lock." + rank, "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        open(f"twice.{rank}.{attempt}", "w").close()
    open(f"up.{rank}.{attempt}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
"""


def one(cluster: Testbed, seed: int, number: int) -> str:
    """Do one drill; return what was done. Raises AssertionError."""
    dice = random.Random(f"{seed}.{number}.spares")
    victim = dice.choice(_VICTIMS)
    kind = dice.choice(("polite", "stubborn"))
    rank = dice.randrange(2)
    delay_s = dice.random() ** 2 * 0.5
    node = cluster.hosts[rank]
    what = f"{number}: spares: {victim} on {node}, {kind}"
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        folder = Path(name)
        options = ("--spares=1", "--num_gpus=1", "--max_restarts=1", "--heartbeat=4", "--grace=0.5")
        launch = start(cluster, folder, *options, script=_SCRIPT, args=(kind,))
        try:
            _await_attempt(launch, 0, what)
            time.sleep(delay_s)
            _act(cluster, launch, victim, node)
            _await_attempt(launch, 1, what)
            (folder / "go").touch()
            assert launch.wait() == 0, f"{what}: {launch.err}"
            if victim in ("cut", "reboot", "power loss", "frozen agent", "agent and guard"):
                assert f"n3 takes the place of {node}" in launch.err, f"{what}: {launch.err}"
            assert "Traceback" not in launch.err, f"{what}: {launch.err}"
            assert not list(folder.glob("twice.*")), f"{what}: a rank is there twice: {launch.err}"
            wait_until(lambda: not cluster.processes(), lambda: f"{what}: left: {cluster.processes()}")
        finally:
            if victim == "cut":
                cluster.heal(node)
            launch.process.kill()
            launch.wait()
            cluster.await_nodes()
            cluster.kill_processes()
    return what


def _await_attempt(launch: Launch, number: int, what: str) -> None:
    wait_until(
        lambda: len(list(launch.folder.glob(f"up.*.{number}"))) == 2,
        lambda: f"{what}: attempt {number}: {launch.err}",
    )


def _act(cluster: Testbed, launch: Launch, victim: str, node: str) -> None:
    if victim == "cut":
        cluster.cut(node)
        return
    if victim in ("reboot", "power loss"):
        cluster.reboot(node, hard=victim == "power loss")
        return
    agent = next(event["pid"] for event in launch.events("agent") if event["host"] == node)
    worker = next(event["pid"] for event in launch.events("spawn") if event["host"] == node)
    guard = cluster.enter(node, "ps", "-o", "ppid=", "-p", str(agent)).stdout.strip()
    pids = {"worker": worker, "agent": agent, "guard": guard}
    signal = "STOP" if "frozen" in victim else "KILL"
    cluster.enter(node, "kill", f"-{signal}", *(str(pid) for name, pid in pids.items() if name in victim))
