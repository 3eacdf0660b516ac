"""Count the files and functions of zlaunch that one training micro-batch runs through.

    zlaunch --num_gpus 2 --no_local_rank -m benchmarks.trace         # prints a line for each part
    zlaunch --num_gpus 2 --no_local_rank -m benchmarks.trace --list  # and the functions, by file

A micro-batch is a forward pass, a backward pass and a step of a model of four layers at stage 3, after three
others, so that nothing of the start is counted. On the CPU, autograd runs hooks in the thread that calls
``backward``, so that one thread's profile has all of them.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch
from torch import nn

import zlaunch

ROOT = Path(zlaunch.__file__).resolve().parent.parent
FOLDERS = ("runtime", "cuda_ops", "zlaunch")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Are read with the function that they are in, and not counted. Python 3.12 calls only the last."""


def make_model() -> nn.Module:
    """Return a model of four layers of 64 features."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 1))


class Trace:
    """Notes every function of zlaunch that is called while it is on, by file, but for comprehensions."""

    def __init__(self) -> None:
        self.found: dict[str, set[tuple[int, str]]] = defaultdict(set)
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code.co_name in COMPREHENSIONS:
            return
        path = os.path.realpath(frame.f_code.co_filename)
        for folder in FOLDERS:
            if path.startswith(f"{ROOT / folder}{os.sep}"):
                self.calls += 1
                self.found[os.path.relpath(path, ROOT)].add(
                    (frame.f_code.co_firstlineno, frame.f_code.co_name)
                )

    def add(self, *others: Trace) -> None:
        """Add what others have noted."""
        for other in others:
            self.calls += other.calls
            for path, functions in other.found.items():
                self.found[path] |= functions

    def __enter__(self) -> Trace:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--stage", type=click.IntRange(0, 3), default=3, show_default=True)
@click.option("--list", "lists", is_flag=True, help="List the functions of each file.")
def main(stage: int, lists: bool) -> None:
    """Train four micro-batches and count what the last one runs through."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "log_level": "error",
    }
    engine, *_ = zlaunch.initialize(model=make_model(), config=config)
    traces = {part: Trace() for part in ("forward", "backward", "both", "step", "all")}
    for index in range(4):
        x = torch.randn(4, 64, device=engine.device)
        micro_batch(engine, x, traces if index == 3 else {})
    traces["both"].add(traces["forward"], traces["backward"])
    traces["all"].add(traces["both"], traces["step"])
    if engine.global_rank == 0:
        print(f"stage {stage}, {engine.world_size} ranks")
        for part, trace in traces.items():
            count = sum(map(len, trace.found.values()))
            print(f"{part}: {len(trace.found)} files, {count} functions, {trace.calls} calls")
        found = traces["all"].found
        if lists:
            for path in sorted(found):
                print(f"{path}: {', '.join(name for _, name in sorted(found[path]))}")
    engine.destroy()


def micro_batch(engine: Any, x: torch.Tensor, traces: Mapping[str, Trace]) -> None:
    """Make a forward pass, a backward pass and a step, each under its trace, if there is one."""
    nothing = nullcontext()
    with traces.get("forward", nothing):
        loss = engine(x).square().mean()
    with traces.get("backward", nothing):
        engine.backward(loss)
    with traces.get("step", nothing):
        engine.step()


if __name__ == "__main__":
    main()
