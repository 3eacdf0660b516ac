"""`zlaunch init`: ask five questions, and write a config and a batch file to begin with."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option
from zlaunch.cli.estimate import number
from zlaunch.cli.submit import choose_queue
from zlaunch.errors import LaunchError

_VOCAB = 32_000
_SHAPE = re.compile(r"(?:(\d{1,5})x)?(\d{1,5})")


@click.command(cls=Command, context_settings=SETTINGS, short_help="Write a config and a batch file.")
@click.option("--script", metavar="FILE", help="What is to be run.")
@click.option("--gpus", metavar="[NODESx]GPUS", help="GPUs, or nodes and the GPUs of each: 8, 2x8.")
@click.option("--gpu_mem", type=click.FloatRange(min=1), metavar="GIB", help="Memory of a GPU.")
@click.option("--params", metavar="N", help="Parameters of the model: 7B; 0: not known.")
@count_option("--batch", help="Samples of an optimizer step, over all GPUs.")
@count_option("--seq", default=2048, show_default=True, help="Tokens of a sample, for the estimate.")
@click.option("--partition", metavar="NAME", help="Partition of SLURM.")
@click.option("--time", metavar="TIME", help="Time limit in SLURM: 24:00:00.")
@click.option("--config", default="ds.json", show_default=True, metavar="FILE", help="Config to write.")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
def init(
    script: str | None,
    gpus: str | None,
    gpu_mem: float | None,
    params: str | None,
    batch: int | None,
    seq: int,
    partition: str | None,
    time: str | None,
    config: str,
    force: bool,
) -> None:
    """Write a config, and in SLURM a batch file, to begin with.

    It asks for what no option says. The stage, offload and checkpointing are the fastest that fit, by the
    estimate of `zlaunch estimate --for fits` for a transformer of so many parameters.
    """
    from zlaunch.system.devices import discover

    batch_file = f"{Path(config).stem}.sbatch" if _has_slurm(partition, time) else None
    for file in (config, batch_file):
        if file is not None and os.path.exists(file) and not force:
            raise LaunchError(f"{file} is there already: --force overwrites it, --config writes another one")
    script = script or click.prompt("What is to be run", default="train.py")
    here = len(discover(os.environ).tokens) or 1
    nodes, count = _shape(
        gpus or click.prompt("On how many GPUs (8, or 2x8 for two nodes)", default=str(here))
    )
    gpu_mem = gpu_mem or click.prompt(
        "How much memory has a GPU, in GiB", default=24.0, type=click.FloatRange(min=1)
    )
    size = params or click.prompt("How many parameters has the model (7B; 0: not known)", default="0")
    numel = 0.0 if size.strip() == "0" else number(size.strip())
    world = nodes * count
    batch = batch or click.prompt(
        "How many samples has a step, over all GPUs", default=world, type=click.IntRange(min=1)
    )
    if batch % world:
        below = max(world, batch // world * world)
        raise LaunchError(f"{batch} samples are no multiple of {world} GPUs: take {below} or {below + world}")
    text, said = _config(numel, nodes, count, gpu_mem, seq, batch)
    job = None
    if batch_file is not None:
        from zlaunch.slurm.script import BatchScript, render

        job = render(
            BatchScript(
                script=script,
                script_args=("--config", config),
                nodes=nodes,
                gpus_per_node=count,
                partition=partition,
                time=time,
                job_name=Path(script).stem or None,
            )
        )
    _write(config, text)
    click.echo(f"{config}: {said}")
    if not os.path.isfile(script):
        click.echo(f"{script}: is not there yet; the README has one of 20 lines")
    command = f"zlaunch --num_gpus {count} {script} --config {config}"
    if batch_file is not None and job is not None:
        _write(batch_file, job)
        click.echo(f"{batch_file}: {nodes} node{'s' * (nodes > 1)} with {count} GPU{'s' * (count > 1)} each")
        command = f"sbatch {batch_file}"
    elif nodes > 1:
        command = f"zlaunch --hostfile hosts --num_gpus {count} {script} --config {config}"
        click.echo(f"hosts: write a line for each of the {nodes} nodes: NAME slots={count}")
    click.echo(f"then: {command}")


def _has_slurm(partition: str | None, time: str | None) -> bool:
    return bool(partition or time or choose_queue(None) == "slurm")


def _shape(text: str) -> tuple[int, int]:
    """Read nodes and GPUs of each."""
    found = _SHAPE.fullmatch(text.strip().lower())
    nodes, count = (int(found[1] or 1), int(found[2])) if found else (0, 0)
    if not nodes or not count:
        raise LaunchError(f"{text!r} GPUs: write a number, or 2x8 for two nodes of eight")
    return nodes, count


def _config(numel: float, nodes: int, count: int, gpu_mem: float, seq: int, batch: int) -> tuple[str, str]:
    """Return the text of a config, and what is to be said about it. Raises LaunchError."""
    from zlaunch.runtime.errors import MemoryPlanError
    from zlaunch.runtime.memory import choices
    from zlaunch.runtime.memory.activations import of_numbers
    from zlaunch.runtime.memory.estimate import GIB
    from zlaunch.runtime.memory.model_sizes import from_numbers
    from zlaunch.runtime.rank_mesh import MeshShape

    axes = MeshShape(nodes * count)
    samples = f'{{\n  "train_batch_size": {batch},  // samples of an optimizer step, over all GPUs'
    if not numel:
        lines = (
            samples,
            '  "train_micro_batch_size_per_gpu": 1,  // more, as far as memory goes, is faster',
            '  "bf16": {"enabled": true},  // half the memory and traffic of parameters',
            '  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},  // the learning rate is yours',
            '  "zero_optimization": {"stage": 2}  // optimizer and gradients are shared between the GPUs\n}',
        )
        return "\n".join(lines), "stage 2; `zlaunch estimate` finds what fits once the size is known"
    hidden, layers = _usual_shape(numel)
    machines = choices.Machines(
        nodes=nodes, gpus=count, gpu_bytes=int(gpu_mem * GIB), host_bytes=None, axes=axes
    )
    try:
        sizes = from_numbers(numel, hidden, layers, _VOCAB)
    except MemoryPlanError as error:
        raise LaunchError(str(error)) from None
    activations = of_numbers(sizes, seq, 1, 2)
    best = choices.fastest_that_fits(choices.compare(sizes, machines, activations, dtype_bytes=2), machines)
    if best is None:
        raise LaunchError(
            f"{sizes.name} does not fit on {nodes * count} GPUs of {gpu_mem:g} GiB with any stage and "
            "offload: take more GPUs, or a smaller --seq"
        )
    text = choices.config_text(best, dtype="bf16", micro_batch=1, axes=axes)
    what = best.choice.name + (" with activation checkpointing" if best.choice.checkpointed else "")
    shape = f"{layers} layers of width {hidden}, {seq:,} tokens a sample"
    return text.replace("{", samples, 1), f"{what}, estimated for {shape}; host memory was not checked"


def _usual_shape(numel: float) -> tuple[int, int]:
    """Return the width and depth of a transformer of so many parameters that is 128 times as wide as deep."""
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))
    while layers > 1 and 12 * (128 * layers) ** 2 * layers + _VOCAB * 128 * layers > numel:
        layers -= 1
    return (128 * layers, layers) if 12 * (128 * layers) ** 2 * layers <= numel else (16, 1)


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file}: cannot be written: {error.strerror}") from None
