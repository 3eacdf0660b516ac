"""Reports the metrics of a step to the launcher."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from .environment import read_environment
from .log import show

_SHOWN = ("step", "loss", "lr", "loss_scale", "grad_norm", "samples_per_s", "tokens_per_s", "tflops")


class Reported:
    """Notes what the script itself has reported."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """What it reports by itself, the runtime does not."""
        self.step: float | None = None
        """Is its last step, until the runtime has seen it."""
        self.tokens_at: float | None = None


reported = Reported()
"""Holds the notes of this process."""


def report(**values: float | int | None) -> None:
    """Tell the launcher (or, without one, standard error of rank 0) the metrics of a step.

    The runtime reports an engine's steps by itself; this adds what it cannot know. Known names are shown by
    name (``step``, ``steps``: how many there will be, ``loss``, ``lr``, ``loss_scale``, ``grad_norm``,
    ``tokens_per_s``, ``memory_gb``); others, such as ``val_loss``, are kept for `zlaunch watch` and `zlaunch
    report`. ``tokens``: how many all ranks have trained on since the last such report, from which the speed
    is known. Never raises: a closed pipe must not end a run. Under zlaunch every rank may report; the console
    shows rank 0 and the memory of all.
    """
    environment = read_environment()
    if values.get("tokens") is not None:
        now, before = time.perf_counter(), reported.tokens_at
        reported.names.add("tokens_per_s")
        reported.tokens_at = now
        if before is not None:
            values.setdefault("tokens_per_s", float(values["tokens"] or 0) / max(now - before, 1e-9))
    shown = {name: value for name, value in values.items() if value is not None}
    reported.names |= shown.keys() - {"step", "steps"}
    reported.step = shown.get("step", reported.step)
    if environment.event_fd is None:
        if environment.rank == 0:
            show(" ".join(f"{k} {v:.6g}" for k, v in shown.items()), sys.stderr)
        return
    announce("metrics", values=shown)


def send_step(values: Mapping[str, float], *, printed: bool) -> None:
    """Tell the launcher, or without one standard error, what the runtime knows of a step. ``printed``: where
    each report is a line, this is one.
    """
    if read_environment().event_fd is not None:
        announce("metrics", values=values, printed=printed)
    elif printed:
        show(" ".join(f"{name} {values[name]:.6g}" for name in _SHOWN if name in values), sys.stderr)


def announce(kind: str, **content: Any) -> None:
    """Tell the launcher, if there is one, about an event. Never raises."""
    environment = read_environment()
    if environment.event_fd is None:
        return
    event = {"type": kind, "rank": environment.rank, "time": time.time(), **content}
    try:
        os.write(environment.event_fd, json.dumps(event, default=_plain).encode() + b"\n")
    except (OSError, ValueError, TypeError, RuntimeError, RecursionError):
        pass


def _plain(value: Any) -> object:
    """Make a number of a tensor or of numpy's; a text of anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def describe(device: torch.device) -> dict[str, str]:
    """Describe what this process runs on: versions and the device, by name."""
    from zlaunch import __version__

    found = {
        "zlaunch": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": platform.platform(),
        "device": "CPU",
    }
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return found
