"""Runs features in a worker process and writes down, after each stage, what became of it."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zlaunch
from tests.matrix.registry import Feature, load_features
from tests.matrix.sides import Side

SEED = 7
PATIENCE = 30.0
"""Seconds that a rank that is through with a stage waits for the others."""
FLOOR = 1e-3
"""Differences are relative to the largest element of a tensor, but at least to this."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """Give the largest difference of two tensors, relative to the second; infinite for another shape."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    if want.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    scale = want.double().abs().max().clamp_min(FLOOR)
    return float((got.double() - want.double()).abs().max() / scale)


def differences(got: Side, want: Side, tolerance: float) -> str:
    """Describe what differs between two sides; empty if nothing does."""
    if got.records.keys() != want.records.keys():
        return f"other names: {sorted(got.records.keys() ^ want.records.keys())[:8]}"
    errors = {}
    for name, value in want.records.items():
        whole = value.chunk(got.world)[got.rank] if name in want.shares else value
        errors[name] = relative_error(got.records[name], whole)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if not wrong:
        return ""
    named = ", ".join(f"{name} {error:.1e}" for name, error in list(wrong.items())[:5])
    return f"{len(wrong)} of {len(errors)} values differ: {named}"


def _report() -> str:
    """Describe the present exception: what it says, then where it came from."""
    lines = traceback.format_exc(limit=-8).rstrip().split("\n")
    return "\n".join([lines[-1], *lines])


class Worker:
    """Runs stages of features one after the other, in step with the other ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.world = folder, dist.get_rank(), dist.get_world_size()
        self.stacks = (folder / f"stacks.{self.rank}").open("w")
        faulthandler.enable(self.stacks)
        faulthandler.register(signal.SIGUSR2, file=self.stacks, all_threads=True)
        (folder / f"pid.{self.rank}").write_text(str(os.getpid()))
        self.references: dict[str, Side | str] = {}

    def reference(self, key: str, feature: Feature) -> Side | str:
        """Run the feature by plain torch, once; its error if that fails."""
        if key not in self.references:
            self.references.clear()
            side = Side(None, self.folder)
            try:
                torch.manual_seed(SEED)
                feature.run(side)
                side.finish()
                broken = [name for name, value in side.records.items() if not bool(value.isfinite().all())]
                self.references[key] = f"in plain torch: {broken[:5]} are not finite" if broken else side
            except Exception:
                self.references[key] = "in plain torch: " + _report()
        return self.references[key]

    def stage(self, key: str, feature: Feature, stage: int) -> tuple[str, bool]:
        """Run the feature under one stage: what is wrong, and whether the process can go on."""
        pattern = feature.refuses.get(stage)
        scratch = self.folder / key.replace("/", "_") / str(stage)
        scratch.mkdir(parents=True, exist_ok=True)
        want: Side | str = ""
        if pattern is None:
            want = self.reference(key, feature)
            if isinstance(want, str):
                return want, True
        side = Side(stage, scratch)
        torch.manual_seed(SEED)
        try:
            feature.run(side)
            side.finish()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            allowed = pattern or feature.may_refuse
            if allowed and re.search(allowed, text, re.IGNORECASE | re.DOTALL):
                side.close_after_error()
                return "", True
            wanted = f"instead of an error that says {pattern!r}: " if pattern is not None else ""
            return wanted + _report(), False
        if pattern is not None:
            return f"no error that says {pattern!r}", True
        assert isinstance(want, Side)
        return differences(side, want, feature.tolerance), True

    def run(self, key: str, feature: Feature, stage: int) -> bool:
        """Run one stage with a deadline, write the result down and meet the other ranks.

        Whether all of them can go on in these processes.
        """
        name = f"{key}@{stage}".replace("/", "_")
        (self.folder / f"now.{self.rank}").write_text(f"{key}@{stage}")
        faulthandler.dump_traceback_later(feature.seconds, exit=True, file=self.stacks)
        started = time.process_time()
        message, goes_on = self.stage(key, feature, stage)
        faulthandler.cancel_dump_traceback_later()
        result = {"wrong": message, "goes_on": goes_on, "cpu_seconds": time.process_time() - started}
        mine = self.folder / f"{name}.{self.rank}"
        part = self.folder / f"{mine.name}.part"
        part.write_text(json.dumps(result))
        part.rename(mine)
        return self._meet(name) and goes_on

    def _meet(self, name: str) -> bool:
        deadline = time.monotonic() + PATIENCE
        others = [r for r in range(self.world) if r != self.rank]
        while time.monotonic() < deadline:
            found = [self.folder / f"{name}.{r}" for r in others]
            if all(path.exists() for path in found):
                return all(json.loads(path.read_text())["goes_on"] for path in found)
            time.sleep(0.0005)
        for rank in others:  # they write their stacks
            with suppress(OSError, ValueError):
                os.kill(int((self.folder / f"pid.{rank}").read_text()), signal.SIGUSR2)
        time.sleep(1.0)
        os._exit(3)


def work(todo: list[tuple[str, int]], folder: str) -> None:
    """Run (feature, stage) pairs until all are done or one leaves these processes in doubt."""
    features: dict[str, Any] = load_features()
    zlaunch.init_distributed()
    worker = Worker(Path(folder))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for key, stage in todo:
            if not worker.run(key, features[key], stage):
                return
