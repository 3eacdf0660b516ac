"""Draw the README's chart of measured comparisons from `benchmarks/results`.

    python -m docs.comparison_chart   # writes docs/assets/comparison.svg, prints the README's figures

Every bar is a median of what a result file holds; `benchmarks/results/README.md` names the command and the
machine of each file. The same results give the same bytes with the same matplotlib (extra `plot`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "assets" / "comparison.svg"
OURS = "#2563eb"
THEIRS = "#9ca3af"
DESCRIPTION = "Draw the README's chart of measured comparisons from benchmarks/results."
CAPTION = "2 CPU cores, no GPU. Medians; shorter bars are better, except for checkpoints. Blue: zlaunch."


@dataclass(frozen=True)
class Panel:
    """A group of bars: the value of each system, in `unit`."""

    title: str
    unit: str
    bars: dict[str, float]
    digits: int = 2

    @property
    def labels(self) -> list[str]:
        """Return the values as the chart writes them."""
        return [f"{value:.{self.digits}f} {self.unit}" for value in self.bars.values()]


def read(name: str) -> Any:
    """Return the content of a result file."""
    return json.loads((RESULTS / name).read_text())


def barrier(runs: list[dict[str, float]]) -> float:
    """Return the median time from the command to all ranks past their first barrier."""
    return statistics.median(run["barrier_s"] for run in runs)


def panels() -> list[Panel]:
    """Return all panels, with their values as the result files have them."""
    launch = read("launch-2cores-cpu.json")
    train = read("train-15m-2ranks-cpu.json")
    two_workers = read("recovery-2workers-cpu.json")
    three_nodes = read("recovery-3nodes-cpu.json")
    checkpoint = read("checkpoint-2cores-cpu.json")
    pipeline = read("pipeline-2stages-cpu.json")
    systems = {f"zlaunch stage {stage}": f"stage {stage}" for stage in range(4)}
    systems |= {"DDP": "ddp", "FSDP2": "fsdp2"}
    systems |= {f"DeepSpeed stage {stage}": f"deepspeed {stage}" for stage in (1, 2, 3)}
    return [
        Panel(
            "Launch, until the first barrier",
            "s",
            {
                "zlaunch, 2 workers": barrier(launch["local"]["zlaunch"]),
                "torchrun, 2 workers": barrier(launch["local"]["torchrun"]),
                "deepspeed, 2 workers": barrier(launch["local"]["deepspeed"]),
                "zlaunch, 3 nodes (ssh)": barrier(launch["nodes"]["zlaunch by ssh"]),
                "torchrun, 3 nodes (ssh)": barrier(launch["nodes"]["torchrun by ssh"]),
            },
        ),
        Panel(
            "Recovery, from SIGKILL to the next step",
            "s",
            {
                "zlaunch, 2 workers": two_workers["zlaunch"]["seconds"]["median"],
                "torchrun, 2 workers": two_workers["torchrun"]["seconds"]["median"],
                "zlaunch, 3 nodes": statistics.median(three_nodes["kills"]["seconds"]),
                "torchrun, 3 nodes (one kill)": statistics.median(three_nodes["torchrun"]["seconds"]),
            },
        ),
        Panel(
            "Training step, 15M parameters, 2 ranks",
            "s",
            {name: statistics.median(train["seconds"][key]) for name, key in systems.items()},
        ),
        Panel(
            "Peak memory of a rank, same training",
            "MB",
            {name: max(train["memory_mb"][key]) for name, key in systems.items()},
            digits=0,
        ),
        Panel(
            "Checkpoint of 768 MB (longer is better)",
            "GB/s",
            {
                "zlaunch, save": checkpoint["GB/s"]["save ours"],
                "torch.save": checkpoint["GB/s"]["save torch.save"],
                "DCP, save": checkpoint["GB/s"]["save DCP"],
                "zlaunch, load": checkpoint["GB/s"]["load ours"],
                "torch.load": checkpoint["GB/s"]["load torch.load"],
                "DCP, load": checkpoint["GB/s"]["load DCP"],
            },
        ),
        Panel(
            "Pipeline step, 2 stages, 8 micro-batches",
            "s",
            {
                "zlaunch": statistics.median(pipeline["seconds"]["ours"]),
                "torch.distributed.pipelining": statistics.median(pipeline["seconds"]["torch"]),
            },
            digits=3,
        ),
    ]


def paired(ours: list[float], theirs: list[float]) -> float:
    """Return the median, over rounds, of our speed beside theirs in the same round."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def figures() -> list[str]:
    """Return the README's sentences about these results."""
    train = read("train-15m-2ranks-cpu.json")
    times = train["seconds"]
    beside_ddp = [paired(times[f"stage {stage}"], times["ddp"]) for stage in range(3)]
    beside_deepspeed = [paired(times[f"stage {n}"], times[f"deepspeed {n}"]) for n in (1, 2, 3)]
    beside_fsdp2 = paired(times["stage 3"], times["fsdp2"])
    checkpoint = read("checkpoint-2cores-cpu.json")["GB/s"]
    pipeline = read("pipeline-2stages-cpu.json")["seconds"]
    beside_pipelining = paired(pipeline["ours"], pipeline["torch"])
    recovery = read("recovery-2workers-cpu.json")
    load = checkpoint["load ours"] / checkpoint["load torch.load"]
    return [
        f"Faster: stages 0 to 2 at {min(beside_ddp):.2f} to {max(beside_ddp):.2f} times DDP's speed, "
        f"stage 3 at {beside_fsdp2:.2f} times FSDP2's, stages 1 to 3 at {min(beside_deepspeed):.2f} to "
        f"{max(beside_deepspeed):.2f} times DeepSpeed's.",
        f"Slower: loading a checkpoint runs at {load:.2f} times the speed of `torch.load`, "
        f"a pipeline step at {beside_pipelining:.2f} times the speed of `torch.distributed.pipelining`.",
        f"Recovery: zlaunch resumed after {len(recovery['zlaunch']['kills'])} of "
        f"{recovery['arguments']['kills']} kills; torchrun resumed after "
        f"{len(recovery['torchrun']['kills'])} and then hung.",
    ]


def draw(out: Path) -> None:
    """Write the chart of all panels to `out`."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "zlaunch", "svg.fonttype": "none", "font.size": 9}):
        shown = panels()
        pairs = [shown[row : row + 2] for row in range(0, len(shown), 2)]
        slots = [max(len(panel.bars) for panel in pair) for pair in pairs]
        figure, axes = pyplot.subplots(
            len(pairs),
            2,
            figsize=(10, 0.25 * sum(slots) + 0.5 * len(pairs) + 0.3),
            gridspec_kw={"height_ratios": slots},
            layout="constrained",
        )
        figure.suptitle(CAPTION, fontsize=9)
        for row, pair in enumerate(pairs):
            for axis, panel in zip(axes[row], pair, strict=True):
                values = list(panel.bars.values())
                colours = [OURS if name.startswith("zlaunch") else THEIRS for name in panel.bars]
                bars = axis.barh(list(panel.bars), values, color=colours, height=0.7)
                axis.bar_label(bars, panel.labels, padding=3)
                axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
                axis.set_xlim(0, 1.25 * max(values))
                axis.set_ylim(slots[row] - 0.5, -0.5)  # downwards, with bars of one height in all panels
                axis.set_xticks([])
                axis.tick_params(axis="y", length=0)
                axis.spines[:].set_visible(False)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--out", type=Path, default=PICTURE, help="file to write [default: %(default)s]")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out)
    print(out)
    print(*figures(), sep="\n")


if __name__ == "__main__":
    main()
