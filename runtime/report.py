"""Reports the metrics of a step to the launcher."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .environment import read_environment
from .log import show

if TYPE_CHECKING:
    import torch

_SHOWN = ("step", "loss", "lr", "loss_scale", "grad_norm", "samples_per_s", "tokens_per_s", "tflops")


class Reported:
    """Notes what the script itself has reported."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Lists what it reports by itself and the runtime, therefore, does not."""
        self.step: float | None = None
        """Keeps its last step until the runtime has seen it."""
        self.tokens_at: float | None = None
        self.steps: float | None = None
        """Keeps how many steps there will be, where the script says it."""
        self.has_engine = False
        """An engine reports its steps."""


reported = Reported()
"""Holds the notes of this process."""


def report(**values: float | int | None) -> None:
    """Report the metrics of a step to the launcher, or to standard error of rank 0 without a launcher.

    An engine reports its steps automatically; use this to add metrics, or to replace one such as ``loss``.
    Every rank may call it; the console shows rank 0, and the memory of all ranks. Never raises.

    Args:
        step, steps: The current step, and the total number of steps.
        loss, lr, loss_scale, grad_norm, tokens_per_s, memory_gb: Shown on the console.
        tokens: Tokens that all ranks have trained on since the last report; gives the speed.
        values: Other names, such as ``val_loss``, appear in `zlaunch watch` and `zlaunch report`.
    """
    shown = {name: _plain(value) for name, value in values.items() if value is not None}
    numbers = {name: value for name, value in shown.items() if isinstance(value, (int, float))}
    if "tokens" in numbers:
        now = time.perf_counter()
        before = reported.tokens_at
        reported.names.add("tokens_per_s")
        reported.tokens_at = now
        if before is not None:
            shown.setdefault("tokens_per_s", numbers["tokens"] / max(now - before, 1e-9))
    reported.names |= shown.keys() - {"step", "steps"}
    reported.step = numbers.get("step", reported.step)
    reported.steps = numbers.get("steps", reported.steps)
    if not announce("metrics", values=shown) and read_environment().rank == 0:
        words = (f"{k} {v:.6g}" if isinstance(v, (int, float)) else f"{k} {v}" for k, v in shown.items())
        show(" ".join(words), sys.stderr)


def report_logged(values: Mapping[str, float]) -> None:
    """Tell the launcher what a Trainer logs, and prints itself. With an engine, leave out what it reports."""
    own = {"step", *([] if reported.has_engine else _SHOWN)}
    reported.steps = values.get("steps") or reported.steps
    kept = {name: value for name, value in values.items() if name in own or name not in _SHOWN}
    if kept.keys() != {"step"}:
        announce("metrics", values=kept, printed=False)


def send_step(values: Mapping[str, float], *, printed: bool) -> None:
    """Tell the launcher, or without one standard error, what the runtime knows of a step. ``printed``: where
    each report is a line, this is one.
    """
    if not announce("metrics", values=values, printed=printed) and printed:
        show(" ".join(f"{name} {values[name]:.6g}" for name in _SHOWN if name in values), sys.stderr)


def announce(kind: str, **content: Any) -> bool:
    """Tell the launcher about an event; return False without a launcher. Never raises."""
    environment = read_environment()
    if environment.event_fd is None:
        return False
    event = {"type": kind, "rank": environment.rank, "time": time.time(), **content}
    try:
        os.write(environment.event_fd, json.dumps(event).encode() + b"\n")
    except (OSError, ValueError):
        pass
    return True


def _plain(value: Any) -> int | float | str:
    """Make a number of a tensor or of numpy's; a text of anything else, and of what no float can hold."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)
    return value if isinstance(value, int) else number


def describe(device: torch.device) -> dict[str, str]:
    """Describe what this process runs on: versions and the device, by name."""
    import torch  # here, so that a script that only reports need not wait for it

    from zlaunch import __version__

    found = {
        "zlaunch": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()}",
        "device": "CPU",
    }
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return found
