"""Measure the time from the kill of a worker to the next finished step, beside torchrun.

    python -m benchmarks.recovery [--kills 20] [--systems zlaunch,torchrun] [--cost] [--out FILE.json]

Two CPU workers train a small model. A random worker repeatedly gets SIGKILL at a random moment. Under
zlaunch, the run resumes from snapshots in memory (`checkpoint.in_memory`), taken every 10 steps. Under
torchrun, `--max-restarts` restarts a script of plain torch (DDP), which loads the checkpoint that rank 0
saved to disk every 10 steps. The systems run one after the other. At the end, the losses of every step must
be bit-identical to those of a run without kills. A run that does not resume within a minute is a failure.

`--cost` measures the cost of snapshots instead. The same two processes hold two engines of a model with 15
million parameters, one with a snapshot every 10 steps, and run them in turns of 20 steps. Each turn includes
the time until its snapshots are written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
EVERY = 10
LIMIT_S = 60.0

SCRIPT = """
    import os, sys, time, torch, zlaunch

    last = int(sys.argv[1])
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"in_memory": {"every": EVERY}},
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    engine, *_ = zlaunch.initialize(model=model, config=config)
    engine.client_state = dict
    engine.load_checkpoint(None)
    log = open(f"rank{engine.global_rank}.log", "a")
    print("begins", engine.global_steps, os.getpid(), file=log, flush=True)
    while engine.global_steps < last:
        generator = torch.Generator().manual_seed(engine.global_steps * 2 + engine.global_rank)
        x = torch.randn(8, 256, generator=generator)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        print("step", engine.global_steps, time.time(), loss.item(), file=log, flush=True)
"""
DDP = """
    import os, sys, time, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    last, rank, step = int(sys.argv[1]), dist.get_rank(), 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    engine = torch.nn.parallel.DistributedDataParallel(model)
    log = open(f"rank{rank}.log", "a")
    print("begins", step, os.getpid(), file=log, flush=True)
    while step < last:
        generator = torch.Generator().manual_seed(step * 2 + rank)
        x = torch.randn(8, 256, generator=generator)
        loss = (engine(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print("step", step, time.time(), loss.item(), file=log, flush=True)
        if step % EVERY == 0 and rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "new.pt")
            os.replace("new.pt", "saved.pt")
"""


class _Hangs(Exception):
    """Says what has not happened in time."""


COST = """
    import json, statistics, sys, time, torch, torch.distributed as dist, zlaunch
    from benchmarks.systems import MODELS, _model

    micro, rounds = map(int, sys.argv[1:])
    def build(**checkpoint):
        config = {
            "train_micro_batch_size_per_gpu": micro,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "checkpoint": checkpoint,
        }
        engine, *_ = zlaunch.initialize(model=_model(MODELS["15m"], torch.device("cpu")), config=config)
        engine.client_state = dict
        return engine
    engines = {"plain": build(), "snapshots": build(in_memory={"every": EVERY})}
    tokens = torch.randint(0, 256, (micro, MODELS["15m"].context + 1))
    def train(engine, steps):
        for _ in range(steps):
            logits = engine(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
    def turn(engine):  # two snapshots, each with steps behind it beside which it is written
        dist.barrier()
        start = time.perf_counter()
        train(engine, 2 * EVERY)
        dist.barrier()
        seconds = time.perf_counter() - start
        engine.checkpoints.wait()
        if hasattr(engine.checkpoints, "_snapshots"):
            engine.checkpoints._snapshots.wait()
        return seconds
    for engine in engines.values():
        train(engine, EVERY // 2)
    found = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            seconds = turn(engine)
            if number:  # the first ones do much for the first time
                found[name].append(seconds)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
"""


def measure_cost(micro_batch: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of 20 steps without and with snapshots, by round, and the median of the ratios."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").write_text(textwrap.dedent(COST).replace("EVERY", str(EVERY)))
        command = [sys.executable, "-m", "zlaunch", "--num_gpus=2", "--no_local_rank", "-q", "train.py"]
        root = Path(__file__).resolve().parent.parent
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
        done = subprocess.run(
            [*command, str(micro_batch), str(rounds)], cwd=name, env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    found = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    ratios = [more / plain for plain, more in zip(found["plain"], found["snapshots"], strict=True)]
    return {"micro_batch": micro_batch, **found, "ratio": statistics.median(ratios)}


def _wait(look: Callable[[], T], what: str) -> T:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.005)
    raise _Hangs(f"waited {LIMIT_S:.0f} s for {what}")


class Run:
    """Holds a run under one of the systems."""

    def __init__(self, system: str, folder: Path, last: int, kills: int) -> None:
        """Start it: `last` steps, and room for so many kills."""
        self.folder = folder
        script = SCRIPT if system == "zlaunch" else DDP
        (folder / "train.py").write_text(textwrap.dedent(script).replace("EVERY", str(EVERY)))
        if system == "zlaunch":
            command = [sys.executable, "-m", "zlaunch", "--num_gpus=2", f"--max_restarts={kills}"]
            command += ["--no_local_rank", "-q", "train.py", str(last)]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
            command += [f"--max-restarts={kills}", "--monitor-interval=0.1", "--standalone"]
            command += ["train.py", str(last)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)

    def _read(self, rank: int) -> str:
        try:
            return (self.folder / f"rank{rank}.log").read_text()
        except OSError:
            return ""

    def begins(self, rank: int) -> list[tuple[int, int]]:
        """List each attempt's first step and process."""
        return [(int(a), int(b)) for a, b in re.findall(r"begins (\d+) (\d+)\n", self._read(rank))]

    def steps(self) -> list[tuple[int, float]]:
        """List the steps that rank 0 has finished, with the time."""
        found = re.findall(r"step (\d+) (\S+) \S+\n", self._read(0))
        return [(int(step), float(moment)) for step, moment in found]

    def losses(self) -> list[dict[int, str]]:
        """Return each rank's loss of every step, of the last time that it was made."""
        logs = [re.findall(r"step (\d+) \S+ (\S+)\n", self._read(rank)) for rank in (0, 1)]
        return [{int(step): loss for step, loss in log} for log in logs]

    def kill(self, number: int, dice: random.Random) -> dict[str, Any]:
        """Kill a worker of an attempt, and wait until a step is finished in the next one."""
        rank = dice.randrange(2)
        _wait(lambda: len(self.begins(rank)) > number, f"attempt {number}")
        first, pid = self.begins(rank)[number]
        _wait(lambda: any(step > first for step, _ in self.steps()[-200:]), "a step")
        time.sleep(dice.random() * 0.4)
        moment = time.time()
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: len(self.begins(0)) > number + 1, f"attempt {number + 1}")
        again = self.begins(0)[number + 1][0]
        after = _wait(
            lambda: [at for step, at in self.steps()[-400:] if at > moment + 0.05 and step == again + 1],
            "the next step",
        )
        done = [step for step, at in self.steps() if at <= moment][-1]
        return {"rank": rank, "seconds": after[-1] - moment, "lost": max(0, done - again)}


def measure(system: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill the workers of one run; return what was measured."""
    dice, last = random.Random(seed), 1 << 30
    with tempfile.TemporaryDirectory() as name:
        run = Run(system, Path(name), last, kills + 1)
        try:
            found, hung = [], ""
            for number in range(kills):
                try:
                    found.append(run.kill(number, dice))
                except _Hangs as error:
                    hung = str(error)
                    break
                if number % 50 == 49:
                    print(f"{system}: {number + 1} kills", flush=True)
            losses = run.losses()
            end = max((step for step, _ in run.steps()), default=0)
        finally:
            run.process.terminate()
            run.process.wait(30)
    with tempfile.TemporaryDirectory() as name:
        straight = Run(system, Path(name), end, 0)
        if straight.process.wait(LIMIT_S + end):
            raise SystemExit((Path(name) / "output").read_text())
        wanted = straight.losses()
    same = all(
        loss == plain[step]
        for found_, plain in zip(losses, wanted, strict=True)
        for step, loss in found_.items()
        if step <= end
    )
    seconds = [each["seconds"] for each in found]
    lost = [each["lost"] for each in found]
    return {
        "kills": found,
        "hung": hung,
        "steps": end,
        "equal_losses": same,
        "seconds": {"median": statistics.median(seconds), "max": max(seconds)} if found else {},
        "lost_steps": {"median": statistics.median(lost), "max": max(lost)} if found else {},
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--systems", default="zlaunch,torchrun")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"arguments": {**vars(args), "out": str(args.out)}}
    costs = ((1, 9), (8, 3)) if args.cost else ()
    systems = [] if args.cost else args.systems.split(",")
    for micro_batch, rounds in costs:
        results[f"cost {micro_batch}"] = cost = measure_cost(micro_batch, rounds)
        step_s = statistics.median(cost["plain"]) / EVERY / 2
        print(
            f"snapshots every {EVERY} steps of {step_s * 1000:.0f} ms: {cost['ratio']:.3f} times the time",
            flush=True,
        )
    for system in systems:
        results[system] = found = measure(system, args.kills, args.seed)
        seconds, lost = found["seconds"], found["lost_steps"]
        said = f"{system:10} {len(found['kills'])} kills"
        if seconds:
            said += f": to the next step {seconds['median']:.2f} s (median), {seconds['max']:.2f} s at most; "
            said += f"steps lost {lost['median']:g}, {lost['max']} at most; "
            said += f"losses equal to the bit: {found['equal_losses']}"
        print(said + (f"; given up: {found['hung']}" if found["hung"] else ""), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
