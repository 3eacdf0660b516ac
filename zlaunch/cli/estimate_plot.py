"""Draw what `zlaunch estimate` has found: the memory of a GPU at every stage and offload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zlaunch.runtime.memory.choices import Estimated, Machines


def check_plot(path: str) -> None:
    """Tell whether a file can be drawn: raises click.UsageError without matplotlib, for a suffix that it does
    not know, and for a folder that is not there.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise click.UsageError("--plot needs matplotlib: pip install 'zlaunch[plot]'") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix
    if suffix[1:].lower() not in kinds:
        raise click.UsageError(
            f"--plot {path}: unknown suffix {suffix!r}; use one of {', '.join(sorted(kinds))}"
        )
    if not Path(path).parent.is_dir():
        raise click.UsageError(f"--plot {path}: no such folder")


def write_plot(path: str, title: str, found: Sequence[Estimated], machines: Machines) -> None:
    """Write stacked bars of all choices, the fastest first. Raises click.UsageError."""
    from matplotlib.figure import Figure

    from zlaunch.runtime.memory.choices import CONTEXT_BYTES
    from zlaunch.runtime.memory.estimate import GIB

    names = [
        f"{each.choice.name}{', checkpointed' * each.choice.checkpointed}: {each.device / GIB:.1f} GiB"
        for each in found
    ]
    parts = {
        "parameters": [each.states.parameters.device for each in found],
        "gradients": [each.states.gradients.device for each in found],
        "optimizer": [each.states.optimizer.device for each in found],
        "activations": [each.activations or 0 for each in found],
    }
    if machines.gpu_bytes is not None:
        parts["CUDA itself"] = [CONTEXT_BYTES] * len(found)
    figure = Figure(figsize=(13, 1.5 + 0.35 * len(found)), layout="constrained")
    axes = figure.subplots()
    start = [0.0] * len(found)
    for part, amounts in parts.items():
        sizes = [amount / GIB for amount in amounts]
        axes.barh(names, sizes, left=start, label=part)
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    if machines.gpu_bytes is not None:
        # Bars far beyond what there is end at the edge: else nothing is seen of those that are near it.
        axes.set_xlim(0, min(1.05 * max(start), 3 * machines.gpu_bytes / GIB))
        axes.axvline(machines.gpu_bytes / GIB, color="black", linestyle="--", label="--gpu_mem")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of a GPU")
    figure.suptitle(title)
    if any(each.activations is None for each in found):
        figure.supxlabel("activations are not known", fontsize="small")
    figure.legend(loc="outside lower center", ncols=len(parts) + 1)
    try:
        figure.savefig(path)
    except OSError as error:
        raise click.UsageError(f"--plot {path}: {error.strerror}") from None
