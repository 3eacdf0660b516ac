"""Reports the metrics of a step to the launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from .environment import read_environment


def report(**values: float | int | None) -> None:
    """Tell the launcher (or, without one, standard error of rank 0) the metrics of a step.

    Known names are shown by name (``step``, ``steps``, ``loss``, ``lr``, ``loss_scale``, ``grad_norm``,
    ``tokens_per_s``, ``memory_gb``); others are passed along. Never raises: a closed pipe must not end a run.
    Under zlaunch every rank may report; the console shows rank 0 and the memory of all.
    """
    environment = read_environment()
    shown = {name: value for name, value in values.items() if value is not None}
    if environment.event_fd is None:
        if environment.rank == 0:
            print(" ".join(f"{k} {v:.6g}" for k, v in shown.items()), file=sys.stderr, flush=True)
        return
    announce("metrics", values=shown)


def announce(kind: str, **content: Any) -> None:
    """Tell the launcher, if there is one, about an event. Never raises."""
    environment = read_environment()
    if environment.event_fd is None:
        return
    event = {"type": kind, "rank": environment.rank, "time": time.time(), **content}
    try:
        os.write(environment.event_fd, json.dumps(event).encode() + b"\n")
    except (OSError, ValueError):
        pass
