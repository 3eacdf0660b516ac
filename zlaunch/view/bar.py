"""Draw a run's progress as one line of a terminal: a bar, steps, times, loss, speed, memory."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.text import Text

from zlaunch.view.progress import RunProgress

_LONGEST_BAR = 40
_SHORTEST_BAR = 6
_BY_IMPORTANCE = (
    *("step", "left", "loss", "elapsed", "speed", "memory"),
    *("lr", "grad_norm", "mfu", "tflops", "loss_scale"),
)
"""Which parts a narrow terminal has first. Numbers that the script reports under its own names come last."""
_IN_ORDER = (
    *("step", "elapsed", "left", "loss", "speed", "memory"),
    *("lr", "grad_norm", "mfu", "tflops", "loss_scale"),
)


def draw_bar(progress: RunProgress, own: Mapping[str, str], now: float, width: int, encoding: str) -> str:
    """Return the line, with the terminal's codes for colors, in at most ``width`` columns; empty where rank 0
    has reported nothing yet. ``own``: what the script has reported under other names, written out; ``now`` in
    seconds since the epoch.
    """
    parts = {**_parts(progress, now), **own}
    if not parts:
        return ""
    steps = progress.steps
    step = progress.step
    bar = _SHORTEST_BAR + 1 if steps and step is not None else 0
    room = width - bar
    chosen: set[str] = set()
    for name in (*_BY_IMPORTANCE, *own):
        if name in parts and len(parts[name]) + bool(chosen) <= room:
            room -= len(parts[name]) + bool(chosen)
            chosen.add(name)
    text = " ".join(parts[name] for name in (*_IN_ORDER, *own) if name in chosen)
    text = "".join(each if each.isprintable() else " " for each in text)
    file = _Terminal(encoding)
    console = Console(file=file, force_terminal=True, width=width, legacy_windows=False, highlight=False)
    if bar and chosen and steps and step is not None:
        length = min(_LONGEST_BAR, _SHORTEST_BAR + room)
        console.print(ProgressBar(total=steps, completed=min(step, steps), width=length), end="")
        text = f" {text}"
    console.print(Text(text), end="", no_wrap=True, overflow="crop", crop=True)
    return file.getvalue()


class _Terminal(io.StringIO):
    """Takes what rich writes; rich reads from it which characters the terminal can show."""

    encoding = ""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding


def _parts(progress: RunProgress, now: float) -> dict[str, str]:
    """Write each part that is known of."""
    values: Mapping[str, Any] = progress.ranks[0].values if 0 in progress.ranks else {}
    memory = [known.values["memory_gb"] for known in progress.ranks.values() if "memory_gb" in known.values]
    step = progress.step
    steps = progress.steps
    if step is None and "loss" not in values:
        return {}
    found = {}
    if step is not None:
        epoch = f" (epoch {progress.of_epoch})" if progress.of_epoch else ""
        found["step"] = f"{step}/{steps}{epoch}" if steps else f"step {step}"
    if progress.started:
        found["elapsed"] = clock(now - progress.started)
    left = progress.seconds_left()
    if left is not None and step is not None and steps is not None and step < steps:
        found["left"] = f"ETA {clock(left)}"
    templates = {
        "loss": "loss {:.4g}",
        "lr": "lr {:.1e}",
        "grad_norm": "norm {:.3g}",
        "tflops": "{:.3g} TFLOPS",
        "loss_scale": "scale {:.10g}",
    }
    found |= {name: template.format(values[name]) for name, template in templates.items() if name in values}
    if "tokens_per_s" in values:
        found["speed"] = f"{values['tokens_per_s']:.0f} tok/s"
    elif "samples_per_s" in values:
        found["speed"] = f"{values['samples_per_s']:.4g} samples/s"
    if 0 <= values.get("mfu", -1.0) <= 1:  # a script may report a number of its own under the name
        found["mfu"] = f"MFU {values['mfu']:.1%}"
    if memory:
        found["memory"] = f"{max(memory):.2f} GB"
    return found


def clock(seconds: float) -> str:
    """Write a time such as `0:07`, `12:05`, `1:02:45`."""
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
