"""Kill workers, cut nodes off and reboot them, on three nodes, and measure how long a run takes to go on.

    python -m tests.cluster.recovery_drills [--kills 100] [--cuts 50] [--reboots 20] [--out FILE.json]

One CPU worker a node trains a small model at stage 3, with a snapshot in memory every 5 steps of 50 ms.
`kills`: SIGKILL to a random worker at a random moment, again and again in one run; the same beside it under
`torchrun --max-restarts`, with plain DDP that saves to the disk, until that does not go on for a minute.
`cuts`: the cable of one of two nodes is pulled, and a spare takes its place; each is a run of its own.
`reboots`: a node of three is rebooted, the run goes on with two and then with three again.
Every run's losses are compared with those of a run that nothing happened to: to the bit, where the number of
ranks stays the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.recovery import begins, losses, moments, plain, straight, train
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch
from tests.limits import wait_until

EVERY, STEP_S, HEARTBEAT_S, GIVEN_UP_S = 5, 0.05, 5.0, 60.0
_ENDLESS = 1 << 30
_DDP = """
    import os, sys, time, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size, step = dist.get_rank(), dist.get_world_size(), 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    engine = torch.nn.parallel.DistributedDataParallel(model)
    with open(f"pid{rank}", "a") as file:
        print(os.uname().nodename, os.getpid(), time.time(), file=file)
    log = open(f"rank{rank}.log", "a")
    while True:
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        x = batch.chunk(size)[rank]
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print("step", step, time.time(), file=log, flush=True)
        if step % 5 == 0 and rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "new")
            os.replace("new", "saved.pt")
        time.sleep(0.05)
"""


def _workers(launch: Launch) -> dict[int, tuple[str, int]]:
    """Rank -> host and process id, of the last attempt."""
    return {event["rank"]: (event["host"], event["pid"]) for event in launch.events("spawn")}


def _await_step_after(launch: Launch, attempt: int, limit_s: float = GIVEN_UP_S) -> tuple[int, float]:
    """Wait until an attempt has finished a step; return where it begins, and when its first step was done."""

    def look() -> tuple[int, float] | None:
        known = begins(launch)
        if len(known) <= attempt:
            return None
        position = launch.log(0).rfind("begins at")
        after = [line.split() for line in launch.log(0)[position:].splitlines()[1:]]
        done = [words for words in after if words[:1] == ["step"] and len(words) == 4]
        return (known[attempt][0], float(done[0][3])) if done else None

    return wait_for(look, f"attempt {attempt} goes on: {launch.err[-500:]}", limit_s)


def wait_for(look: Callable[[], Any], what: str, limit_s: float) -> Any:
    """Return what `look` finds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.01)
    raise TimeoutError(what)


def _end(launch: Launch) -> None:
    launch.process.terminate()
    assert launch.wait() == 143, launch.err


def _same(launch: Launch, cluster: Testbed, folder: Path, *options: str) -> bool:
    found = losses(launch)
    return found == straight(cluster, folder, *options, last=max(found))


def kills(cluster: Testbed, folder: Path, count: int, dice: random.Random) -> dict[str, Any]:
    """Kill a worker so many times in one run."""
    launch = train(cluster, folder / "kills", f"--max_restarts={count}", last=_ENDLESS, wait_s=STEP_S)
    seconds, lost = [], []
    for number in range(count):
        _await_step_after(launch, number)
        time.sleep(dice.random() * 0.5)
        host, pid = _workers(launch)[dice.randrange(3)]
        moment = time.time()
        cluster.enter(host, "kill", "-KILL", str(pid))
        begin, after = _await_step_after(launch, number + 1)
        seconds.append(after - moment)
        lost.append(max((step for step, at in moments(launch) if at <= moment), default=begin) - begin)
        _say(number + 1, "kills", seconds)
    time.sleep(STEP_S * 10)
    _end(launch)
    same = _same(launch, cluster, folder / "straight")
    return {"seconds": seconds, "lost_steps": lost, "equal_losses": same, "disk": _saved(folder / "kills")}


def _saved(folder: Path) -> list[str]:
    """Checkpoints on the disk."""
    return [
        str(path) for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".zero", ".safetensors")
    ]


def torchrun(cluster: Testbed, folder: Path, count: int, dice: random.Random) -> dict[str, Any]:
    """Do the same under torchrun; ends early when it hangs."""
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(_DDP))
    command = f"cd {folder} && exec {sys.executable} -m torch.distributed.run --nnodes=3 --nproc-per-node=1"
    command += f" --rdzv-backend=c10d --rdzv-endpoint={cluster.address('n1')}:29400 --monitor-interval=0.1"
    command += f" --max-restarts={count} train.py"
    agents = [
        subprocess.Popen(
            ["ssh", "-F", str(cluster.ssh_config), host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for host in cluster.hosts
    ]

    def steps() -> list[float]:
        path = folder / "rank0.log"
        return [float(line.split()[2]) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def workers(rank: int) -> list[list[str]]:
        path = folder / f"pid{rank}"
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    seconds: list[float] = []
    hung = ""
    try:
        wait_for(lambda: steps() or None, "torchrun begins", GIVEN_UP_S)
        for number in range(count):
            rank = dice.randrange(3)
            wait_for(
                lambda rank=rank, number=number: len(workers(rank)) > number or None,  # type: ignore[misc]
                f"{number + 1} attempts",
                GIVEN_UP_S,
            )
            time.sleep(0.5 + dice.random() * 0.5)
            host, pid, _ = workers(rank)[-1]
            moment = time.time()
            cluster.enter(host, "kill", "-KILL", pid)
            wait_for(
                lambda number=number: len(workers(0)) > number + 1 or None,  # type: ignore[misc]
                f"a restart after kill {number + 1}",
                GIVEN_UP_S,
            )
            begun = float(workers(0)[number + 1][2])
            after = wait_for(
                lambda begun=begun: next((at for at in steps() if at > begun), None),  # type: ignore[misc]
                f"a step after kill {number + 1}",
                GIVEN_UP_S,
            )
            seconds.append(after - moment)
            _say(number + 1, "kills under torchrun", seconds)
    except TimeoutError as error:
        hung = str(error)
    for agent in agents:
        agent.kill()
    cluster.kill_processes()
    return {"seconds": seconds, "given_up": hung}


def cuts(cluster: Testbed, folder: Path, count: int, dice: random.Random) -> dict[str, Any]:
    """Pull a node's cable, with a spare."""
    seconds, lost, same = [], [], []
    for number in range(count):
        launch = train(cluster, folder / f"cut{number}", "--spares=1", last=_ENDLESS, wait_s=STEP_S)
        wait_until(lambda launch=launch: len(losses(launch)) > 2 * EVERY + 2, "some steps")  # type: ignore[misc]
        time.sleep(dice.random() * 0.5)
        node = dice.choice(cluster.hosts[:2])
        moment = time.time()
        cluster.cut(node)
        try:
            begin, after = _await_step_after(launch, 1)
            seconds.append(after - moment)
            lost.append(max(step for step, at in moments(launch) if at <= moment) - begin)
            time.sleep(STEP_S * 10)
            _end(launch)
        finally:
            cluster.heal(node)
        same.append(_same(launch, cluster, folder / f"straight{number}", "--num_nodes=2"))
        wait_until(lambda: not cluster.processes(), lambda: f"nodes empty, not {cluster.processes()}")
        _say(number + 1, "cuts", seconds)
    return {"heartbeat_s": HEARTBEAT_S, "seconds": seconds, "lost_steps": lost, "equal_losses": all(same)}


def reboots(cluster: Testbed, folder: Path, count: int, dice: random.Random) -> dict[str, Any]:
    """Reboot a node: three, two, three."""
    worst, seconds = 0.0, []
    for number in range(count):
        options = ("--min_nodes=2", f"--max_restarts={4}")
        launch = train(cluster, folder / f"reboot{number}", *options, last=_ENDLESS, wait_s=STEP_S)
        wait_until(lambda launch=launch: len(losses(launch)) > 2 * EVERY + 2, "some steps")  # type: ignore[misc]
        time.sleep(dice.random() * 0.5)
        moment = time.time()
        cluster.reboot(dice.choice(cluster.hosts[1:]))
        _, after = _await_step_after(launch, 1)
        seconds.append(after - moment)
        _await_step_after(launch, 2, 2 * GIVEN_UP_S)
        time.sleep(STEP_S * 20)
        _end(launch)
        assert [world for _, world in begins(launch)] == [3, 2, 3], launch.err
        found = losses(launch)
        wanted = plain(max(found))
        worst = max(
            worst, *(abs(loss - wanted[step]) / max(1.0, wanted[step]) for step, loss in found.items())
        )
        cluster.await_nodes()
        _say(number + 1, "reboots", seconds)
    return {"seconds_to_two_nodes": seconds, "largest_difference_of_a_loss": worst}


def _say(number: int, what: str, seconds: list[float]) -> None:
    print(
        f"{number} {what}: {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most",
        flush=True,
    )


def main() -> None:
    """Do the drills of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, count in (("kills", 100), ("torchrun", 20), ("cuts", 50), ("reboots", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    results: dict[str, Any] = {"arguments": {**vars(args), "out": str(args.out)}}
    with tempfile.TemporaryDirectory(prefix="ztest-") as name:
        bed = Testbed(Path(name) / "bed", slurm=False)
        bed.up()
        try:
            for kind, drill in (
                ("kills", kills),
                ("torchrun", torchrun),
                ("cuts", cuts),
                ("reboots", reboots),
            ):
                if count := getattr(args, kind):
                    own = Path(name) / kind
                    own.mkdir() if kind != "torchrun" else None
                    results[kind] = found = drill(bed, own, count, dice)
                    print(
                        kind, {key: value for key, value in found.items() if "seconds" not in key}, flush=True
                    )
                    if args.out is not None:
                        args.out.write_text(json.dumps(results, indent=1) + "\n")
        finally:
            bed.down()


if __name__ == "__main__":
    main()
