"""Cut off the node of rank 0 and look whether its worker and its successor elsewhere run at the same time.

    python -m tests.cluster.split_brain [--rounds 50] [--seed 1] [--out FILE.json]

Rank 0 writes the time into a file every 10 ms and takes no notice of SIGTERM, as one that saves for all of a
grace period of 20 s. The nodes are namespaces of one kernel, so their CLOCK_BOOTTIME is one clock.
`cut`: the cable is pulled. `hang up`: sshd's process for the connection is killed, so the launcher hears at
once that the connection is gone, and the agent lives. `shut out`: sshd is killed as well, so nobody can look
after the node any more. `kill`: the agent and its watchdog are killed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.helpers import agent_of, start
from tests.cluster.testbed import Testbed
from tests.limits import wait_until

HOWS = ("cut", "hang up", "shut out", "kill")
HEARTBEAT_S, GRACE_S = 4.0, 20.0
WRITES = """
    import os, signal, time
    attempt, until = os.environ["ZLAUNCH_RESTART_COUNT"], time.monotonic() + 600
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        time.sleep(600 if attempt == "0" else 1)
    with open("alive." + attempt, "a") as file:
        while os.environ["RANK"] == "0" and time.monotonic() < until:
            print(time.clock_gettime(time.CLOCK_BOOTTIME), file=file, flush=True)
            time.sleep(0.01)
            if attempt != "0":
                until = min(until, time.monotonic() + 1)
"""


def both_s(cluster: Testbed, folder: Path, how: str, wait_s: float) -> tuple[float, float]:
    """Return the seconds in which two rank 0s were there, and those until the second one began."""
    folder.mkdir()
    given = (f"--heartbeat={HEARTBEAT_S:g}", f"--grace={GRACE_S:g}", "--spares=1", "--num_gpus=1")
    launch = start(cluster, folder, *given, script=WRITES)
    moments = [folder / f"alive.{attempt}" for attempt in (0, 1)]
    wait_until(lambda: moments[0].exists() and moments[0].stat().st_size, lambda: f"rank 0: {launch.err}")
    time.sleep(wait_s)
    agent = agent_of(launch, "n1")
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    _ACTS[how](cluster, agent)
    try:
        assert launch.wait() == 0, launch.err
        wait_until(lambda: not cluster.processes("n1"), lambda: f"n1 empty: {cluster.processes('n1')}")
    finally:
        if how == "cut":
            cluster.heal("n1")
        elif how == "shut out":
            cluster.reboot("n1")
            cluster.await_nodes()
    assert "n3 takes the place of n1" in launch.err, launch.err
    first, second = (list(map(float, path.read_text().split("\n")[:-1])) for path in moments)
    return max(0.0, max(first) - min(second)), min(second) - began


def _cut(cluster: Testbed, agent: int) -> None:
    cluster.cut("n1")


def _hang_up(cluster: Testbed, agent: int) -> None:
    cluster.enter("n1", "pkill", "-KILL", "-f", r"sshd: .*(@notty|\[priv\])")


def _shut_out(cluster: Testbed, agent: int) -> None:
    cluster.enter("n1", "pkill", "-KILL", "sshd")


def _kill(cluster: Testbed, agent: int) -> None:
    cluster.enter("n1", "pkill", "-KILL", "zwatchdog")
    cluster.enter("n1", "kill", "-KILL", str(agent))


_ACTS: dict[str, Callable[[Testbed, int], None]] = dict(
    zip(HOWS, (_cut, _hang_up, _shut_out, _kill), strict=True)
)


def main() -> None:
    """Do the rounds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    dice, found = random.Random(given.seed), []
    with (
        open(Path(tempfile.gettempdir(), "ztest-bed.lock"), "w") as lock,
        tempfile.TemporaryDirectory(prefix="ztest-") as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # its networks have names that are a machine's
        cluster = Testbed(Path(folder) / "bed", slurm=False)
        try:
            cluster.up()
            for number in range(given.rounds):
                how = HOWS[number % len(HOWS)]
                both, after = both_s(cluster, Path(folder, f"round{number}"), how, dice.uniform(0.0, 5.0))
                found.append({"how": how, "both_s": both, "successor_after_s": after})
                text = f"{number + 1}: {how}: {both:.3f} s of two rank 0s, the second after {after:.2f} s"
                print(text, flush=True)
        finally:
            cluster.down()
    clean = sum(each["both_s"] == 0.0 for each in found)
    print(f"{clean} of {len(found)} rounds without two rank 0s")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
