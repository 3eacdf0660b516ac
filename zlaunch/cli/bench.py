"""`zlaunch bench`: measure a disk for offload, and the network."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option, with_options
from zlaunch.cli.estimate import number
from zlaunch.cli.launch_options import WHERE
from zlaunch.system.events import decode

# -- bench net --------------------------------------------------------------------------------------
#
# `zlaunch bench net`: measure the network between the ranks of a launch, and name what is slow.


_MODULE = "zlaunch.runtime.comm.benchmark"
_MOST_LINKS = 12
"""Links that the table shows: the slowest."""
_OPS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}


@click.command(cls=Command, context_settings=SETTINGS)
@with_options(WHERE)
@click.option(
    "--size",
    type=click.FloatRange(min=0.001),
    default=64.0,
    show_default=True,
    metavar="MIB",
    help="Size of the largest buffer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
@click.pass_context
def net(context: click.Context, /, size: float, as_json: bool, **given: Any) -> int:
    """Measure collectives and links between ranks, and name slow ones.

    It starts workers as a launch does and accepts the options of a launch that choose nodes and GPUs.
    Bandwidths are bus bandwidths as in nccl-tests, comparable with the speed of a link.
    """
    from zlaunch.cli.run import run

    folder = tempfile.mkdtemp(prefix="zlaunch-bench-net-")
    arguments = ["--run_dir", folder, "--no_local_rank", "--module", _MODULE, str(size)]
    launch = run.make_context("zlaunch", ["--quiet", *arguments], parent=context)
    launch.params |= given
    code = 0
    try:
        with launch:
            code = int(run.invoke(launch))
        result, names = _result(Path(folder)) if not code else (None, [])
    finally:
        if not code:  # else it stays: the report of the failure names its logs
            shutil.rmtree(folder, ignore_errors=True)
    if result is not None:  # else rank 0 belongs to another task of the SLURM step
        if sum(map(len, result["nodes"])) == 1:
            raise click.UsageError("one rank has no network to measure: use --num_gpus N or --hostfile FILE")
        _show(result, names, as_json=as_json)
    return code


def _result(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what rank 0 has handed over, and the names of the nodes."""
    result = None
    with open(folder / "events.jsonl", "rb") as file:
        for line in file:
            event = decode(line)
            if event is not None and event.get("type") == "result":
                result = event
    plan = json.loads((folder / "plan.json").read_text())
    names = [node["host"] for node in plan["nodes"]]
    if result is not None and len(result["nodes"]) != len(names):
        names = list(result["hosts"])  # the other nodes of a SLURM step have launchers of their own
    return result, names


def _show(result: dict[str, Any], names: Sequence[str], *, as_json: bool) -> None:
    from zlaunch.runtime.comm.benchmark import NetworkLink, name_slow_links, name_slow_nodes

    links = [NetworkLink(**link) for link in result["links"]]
    node_of = {rank: names[i] for i, ranks in enumerate(result["nodes"]) for rank in ranks}
    inside = {
        node_of[speed["ranks"][0]]: float(speed["bus_bytes_per_s"])
        for speed in result["collectives"]
        if (speed["scope"], speed["op"]) == ("node", "all_gather")
    }
    slow = [*name_slow_links(links, names), *name_slow_nodes(inside, "an all-gather")]
    if as_json:
        nodes = [{"name": name, "ranks": ranks} for name, ranks in zip(names, result["nodes"], strict=True)]
        shown = [
            {
                "source": names[link.source],
                "target": names[link.target],
                "latency_s": link.latency_s,
                "bytes_per_s": link.bytes_per_s,
            }
            for link in links
        ]
        found = {"backend": result["backend"], "nodes": nodes, "collectives": result["collectives"]}
        click.echo(json.dumps({**found, "links": shown, "slow": slow}, indent=1))
        return
    _print_tables(result, names, node_of, links)
    for sentence in slow:
        click.echo(sentence)
    if len(links) > 2 and not slow:
        click.echo("no node and no link is slower than the others")


def _print_tables(
    result: dict[str, Any], names: Sequence[str], node_of: dict[int, str], links: Sequence[Any]
) -> None:
    from zlaunch.cli.tables import make_table, stdout_console
    from zlaunch.runtime.comm.benchmark import duration, rate

    places = {"nodes": f"between {len(names)} nodes, one rank each", "world": "all ranks"}
    rows = [
        (
            places.get(speed["scope"], f"in {node_of[speed['ranks'][0]]}"),
            str(len(speed["ranks"])),
            _OPS[speed["op"]],
            duration(speed["latency_s"]),
            rate(speed["bus_bytes_per_s"]),
        )
        for speed in result["collectives"]
    ]
    columns = ("where", "ranks", "collective", "latency", "bandwidth")
    console = stdout_console()
    title = f"Collectives over {result['backend']}"
    console.print(make_table(columns, rows, title=title, right=("ranks", "latency", "bandwidth")))
    if links:
        slowest = sorted(links, key=lambda link: link.bytes_per_s)[:_MOST_LINKS]
        ends = [(names[link.source], names[link.target]) for link in slowest]
        numbers = [(duration(link.latency_s), rate(link.bytes_per_s)) for link in slowest]
        both = [(*end, *number) for end, number in zip(ends, numbers, strict=True)]
        right = ("latency", "bandwidth")
        console.print(make_table(("from", "to", *right), both, title="Links", right=right))
        if len(links) > len(slowest):
            click.echo(f"and {len(links) - len(slowest)} faster links: --json has them")


# -- bench ------------------------------------------------------------------------------------------


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
    from zlaunch.runtime.offload.benchmark import Speed, measure

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
