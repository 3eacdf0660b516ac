"""`zlaunch bench`: measure a disk for offload, and the network."""

from __future__ import annotations

import json
import os

import click

from zlaunch.cli.bench_net import net
from zlaunch.cli.commands import SETTINGS, count_option
from zlaunch.cli.estimate import number


@click.group(context_settings=SETTINGS)
def bench() -> None:
    """Measure a disk or the network between nodes."""


bench.add_command(net)


@bench.command()
@click.argument("path")
@click.option(
    "--size",
    type=click.FloatRange(min=0.001),
    default=1.0,
    show_default=True,
    metavar="GIB",
    help="Size of the test file.",
)
@click.option(
    "--params",
    callback=lambda _context, _option, text: None if text is None else number(text),
    metavar="N",
    help="Also estimate the optimizer step of a model with N parameters, such as 7B.",
)
@count_option(
    "--world_size", default=1, show_default=True, help="Ranks that share the model's states, for --params."
)
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
def io(path: str, size: float, params: float | None, world_size: int, as_json: bool) -> None:
    """Measure the disk of folder PATH and print the best `aio` section."""
    from zlaunch.runtime.errors import DiskError
    from zlaunch.runtime.offload.disk_benchmark import Speed, measure

    if not os.path.isdir(path):
        raise click.UsageError(f"{path}: no such folder")
    speeds: list[Speed] = []
    try:
        for speed in measure(path, int(size * 2**30)):
            speeds.append(speed)
            if not as_json:
                click.echo(
                    f"block {speed.block_bytes >> 10:5d} KiB, {speed.threads} threads: "
                    f"read {speed.read / 1e9:5.2f} GB/s, write {speed.write / 1e9:5.2f} GB/s"
                )
    except DiskError as error:
        raise click.UsageError(error.strerror or str(error)) from None
    best = max(speeds, key=lambda speed: speed.step)
    if as_json:
        rows = [
            {"block_size": s.block_bytes, "threads": s.threads, "read": s.read, "write": s.write}
            for s in speeds
        ]
        click.echo(json.dumps({"direct": best.direct, "measured": rows, "aio": best.aio()}, indent=1))
        return
    if not best.direct:
        click.echo("warning: this file system has no O_DIRECT; these are the speeds of memory", err=True)
    click.echo('"aio": ' + json.dumps(best.aio()))
    if params is not None:
        ranks = f"each of {world_size} ranks" if world_size > 1 else "one rank"
        click.echo(
            f"Adam's state of {params:.3g} parameters, read and written by {ranks} with a disk of its own: "
            f"{best.step_s(params, world_size):.1f} s a step"
        )
