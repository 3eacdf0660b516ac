"""Draw a run as it stands: progress, curve of the loss, split of the time, a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zlaunch.view.bottleneck import bottleneck_of
from zlaunch.view.console import metrics_line
from zlaunch.view.page import LEAST
from zlaunch.view.progress import TIMES, RunProgress, span

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_MOST_LOSSES = 3
"""Curves: the loss, and losses that a script or a Trainer reports, such as `eval_loss`."""
_MOST_RANKS = 32
"""Rows of ranks; of more, the ones that need a look come first."""
_LEAST_RANKS = 2
_OTHER_LINES = 16
"""Rows of ranks in any terminal, and the lines that the rest may take there."""
_BAR_WIDTH = 50
_LIVING = ("running", "on ")
"""Lists how the states of runs begin that have not ended, on this host or another one."""
_SILENT_S = 10.0
"""Shows the age of the last report from this many seconds on."""
_COLORS = ("green", "blue", "magenta", "red", "yellow", "white")
"""Colors of the parts of a step, in the order of TIMES."""


def draw(progress: RunProgress, title: str, state: str, now: float, height: int = 100) -> RenderableType:
    """Draw a run in ``height`` lines; ``now`` in seconds since the epoch."""
    parts: list[RenderableType] = [_headline(progress, title, state, now)]
    values = progress.ranks[0].values if 0 in progress.ranks else {}
    if values:
        parts.append(Text(metrics_line(values, [])))
        if skipped := values.get("skipped_steps"):
            parts.append(Text(f"{skipped:.0f} steps skipped for overflows", style="yellow"))
    losses = [name for name in progress.series if name == "loss" or name.endswith("_loss")]
    for name in losses[:_MOST_LOSSES]:
        points = [y for _, y in progress.series[name].shown()]
        parts.append(Text(f"{name} {sparkline(points, _SPARK_WIDTH)} {points[-1]:.4g}"))
    times = progress.times()
    bottleneck = bottleneck_of(progress)
    if times:
        means = {name: sum(each[name] for each in times.values()) / len(times) for name in TIMES}
        parts.append(_split(means))
    slow = bottleneck.slow_rank if bottleneck is not None else None
    if bottleneck is not None:
        parts.append(Text(bottleneck.sentence))
    parts += [Text(text, style="red") for text in progress.failures[:4]]
    if not progress.ranks and state.startswith(_LIVING):
        parts.append(Text("the workers are starting"))
        return Group(*parts)
    parts.append(_ranks(progress, slow, now, max(_LEAST_RANKS, min(_MOST_RANKS, height - _OTHER_LINES))))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a line of blocks, the last one at its end."""
    if len(values) > width:
        size = len(values) / width
        slices = [values[int(i * size) : int((i + 1) * size)] for i in range(width)]
        values = [sum(part) / len(part) for part in slices]
    low = min(values)
    high = max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high - low > LEAST else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _total_of(progress: RunProgress) -> str:
    """Write what follows the number of a step: its total, and the epoch that this ends."""
    if not progress.steps:
        return ""
    return f" of {progress.steps}" + (f" (epoch {progress.of_epoch})" if progress.of_epoch else "")


def _headline(progress: RunProgress, title: str, state: str, now: float) -> RenderableType:
    end = now if state.startswith(_LIVING) else progress.last
    words = [title, state, span(max(0.0, end - progress.started)) if progress.started else ""]
    if progress.attempt:
        words.append(f"restart {progress.attempt}")
    if progress.step is not None:
        words.append(f"step {progress.step}{_total_of(progress)}")
        silent = now - progress.ranks[0].heard
        if state.startswith(_LIVING) and silent >= _SILENT_S:
            words[-1] += f" as of {span(silent)} ago"
    left = progress.seconds_left(now)
    if left is not None and state.startswith(_LIVING):
        words.append(f"{span(left)} left" + (" in the epoch" if progress.of_epoch else ""))
    line = Text(" · ".join(word for word in words if word), style="bold")
    if not progress.steps or progress.step is None:
        return line
    done = round(_BAR_WIDTH * min(progress.step / progress.steps, 1.0))
    return Group(line, Text("━" * done, style="green") + Text("─" * (_BAR_WIDTH - done)))


def _split(means: dict[str, float]) -> Text:
    """Draw where the time of a step goes, as a bar and as numbers."""
    whole = sum(max(0.0, value) for value in means.values()) or 1.0
    text = Text()
    for name, color in zip(TIMES, _COLORS, strict=True):
        text.append("█" * round(_BAR_WIDTH * max(0.0, means[name]) / whole), style=color)
    text.append("\n")
    for name, color in zip(TIMES, _COLORS, strict=True):
        if means[name] > 0.0:
            text.append("█ ", style=color)
            text.append(f"{name.removesuffix('_ms')} {means[name]:.3g} ms  ")
    return text


def _ranks(progress: RunProgress, slow: int | None, now: float, most: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "host", "state", "memory", "host memory", "GPU", "step", "waits", "heard", ""):
        table.add_column(column, justify="left" if column in ("host", "state", "") else "right")

    def needs_a_look(rank: int) -> tuple[bool, int]:
        return progress.ranks[rank].state in ("running", "done") and rank != slow, rank

    shown = sorted(progress.ranks, key=needs_a_look)[:most]
    for rank in sorted(shown):
        known = progress.ranks[rank]
        times = known.times()
        table.add_row(
            str(rank),
            known.host,
            known.state,
            f"{known.values['memory_gb']:.2f} GB" if "memory_gb" in known.values else "",
            f"{known.values['host_gb']:.2f} GB" if "host_gb" in known.values else "",
            f"{known.values['gpu_use']:.0%}" if "gpu_use" in known.values else "",
            f"{times['all_ms']:.4g} ms" if times else "",
            f"{times['communication_ms']:.4g} ms" if times else "",
            f"{span(max(0.0, now - known.heard))} ago" if known.heard and known.state == "running" else "",
            Text("slow", style="red") if rank == slow else "",
        )
    if len(progress.ranks) > len(shown):
        table.add_row("", f"and {len(progress.ranks) - len(shown)} more")
    return table
