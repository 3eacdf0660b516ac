"""`zlaunch init`: ask five questions, and write a first config and a batch file."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option, option
from zlaunch.cli.estimate import number
from zlaunch.cli.model_shape import VOCAB, usual_shape
from zlaunch.errors import LaunchError
from zlaunch.plan.trainer_use import takes_deepspeed_config, trainer_use
from zlaunch.queue.submit import choose_queue

_SHAPE = re.compile(r"(?:(\d{1,5})x)?(\d{1,5})")
_SCHEMA = "zlaunch.schema.json"
"""Name of the JSON Schema beside a config: editors need no network for it."""


@click.command(
    cls=Command, context_settings=SETTINGS, short_help="Write a first config, and a SLURM batch file."
)
@click.option("--script", metavar="FILE", help="Your training script.")
@option("--num_gpus", "--gpus", "gpus", metavar="N", help="GPUs per node. 2x8 means 2 nodes with 8 GPUs.")
@count_option("--num_nodes", "--nodes", "nodes", help="Nodes.  [default: 1]")
@option("--gpu_mem", type=click.FloatRange(min=1), metavar="GIB", help="Memory of a GPU.")
@option(
    "--host_mem", type=click.FloatRange(min=0.1), metavar="GIB", help="Host memory of a node, for offloading."
)
@click.option("--params", metavar="N", help="Parameters of the model, such as 7B; 0 if you do not know.")
@count_option("--batch", help="Samples per optimizer step, over all GPUs.")
@count_option("--seq", default=2048, show_default=True, help="Tokens per sample, for the estimate.")
@click.option("--partition", metavar="NAME", help="SLURM partition.")
@click.option("--time", metavar="TIME", help="SLURM time limit, such as 24:00:00.")
@click.option("--config", default="ds.json", show_default=True, metavar="FILE", help="Config to write.")
@click.option(
    "--trainer/--no_trainer",
    default=None,
    help="Write a config for the Hugging Face Trainer.  [default: if the script imports a Trainer]",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(
    script: str | None,
    gpus: str | None,
    nodes: int | None,
    gpu_mem: float | None,
    host_mem: float | None,
    params: str | None,
    batch: int | None,
    seq: int,
    partition: str | None,
    time: str | None,
    config: str,
    trainer: bool | None,
    force: bool,
) -> None:
    """Write a first config and, where SLURM is used, a batch file in the current folder.

    It asks for values that no option gives. It picks the fastest stage, offload and activation checkpointing
    that fit and the largest micro-batch that fits with them, as `zlaunch estimate` does.

    For the Hugging Face Trainer, it writes plain JSON with "auto" for what TrainingArguments set, and prints
    those arguments.
    """
    from zlaunch.runtime.config import json_schema
    from zlaunch.runtime.memory.trainer_config import as_command_line, as_keywords, trainer_config
    from zlaunch.system.machine import discover

    batch_file = f"{Path(config).stem}.sbatch" if _has_slurm(partition, time) else None
    for file in (config, batch_file):
        if file is not None and os.path.exists(file) and not force:
            raise LaunchError(
                f"{file} exists: overwrite it with --force, or write another file with --config"
            )
    answers = {
        "--script": script,
        "--num_gpus": gpus,
        "--gpu_mem": gpu_mem,
        "--params": params,
        "--batch": batch,
    }
    try:
        script = script or click.prompt("Training script", default="train.py")
        here = len(discover(os.environ).tokens) or 1
        nodes, count = _shape(gpus or click.prompt("GPUs (8, or 2x8 for 2 nodes)", default=str(here)), nodes)
        gpu_mem = gpu_mem or click.prompt(
            "Memory of a GPU in GiB", default=24.0, type=click.FloatRange(min=1)
        )
        size = params or click.prompt("Parameters of the model (such as 7B; 0 if unknown)", default="0")
        numel = 0.0 if size.strip() == "0" else number(size.strip())
        world = nodes * count
        batch = batch or click.prompt(
            "Samples per optimizer step, over all GPUs", default=world, type=click.IntRange(min=1)
        )
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError):  # Ctrl-C
            raise
        click.echo()  # ends the line of the question
        missing = ", ".join(name for name, value in answers.items() if not value)
        raise click.UsageError(f"stdin ended before all questions were answered: give {missing}") from None
    if batch % world:
        below = max(world, batch // world * world)
        raise LaunchError(
            f"{batch} samples are not a multiple of {world} GPUs: use {below} or {below + world}"
        )
    text, said = _config(numel, nodes, count, (gpu_mem, host_mem), seq, batch)
    text = text.replace("{", f'{{\n  "$schema": "./{_SCHEMA}",', 1)
    uses = trainer_use(script)
    if trainer is None and uses is not None:
        said += f"; for the Trainer that {script} imports (--no_trainer: for your own loop)"
        trainer = True
    script_args: tuple[str, ...] = ("--config", config)
    if takes_deepspeed_config(script):
        script_args = ("--deepspeed", "--deepspeed_config", config)
    keywords = ""
    if trainer:
        text, arguments = trainer_config(text, world)
        if uses is None or uses.parses_arguments:
            script_args = ("--deepspeed", config, *as_command_line(arguments).split())
        else:
            script_args = ()
            keywords = as_keywords({"deepspeed": config, **arguments})
    command_line = shlex.join((script, *script_args))
    job = batch_script = None
    if batch_file is not None:
        from zlaunch.cli.slurm import warn_of_one_core, with_cores
        from zlaunch.slurm.script import BatchScript, render

        batch_script = BatchScript(
            script=script,
            script_args=script_args,
            nodes=nodes,
            gpus_per_node=count,
            partition=partition,
            time=time,
            job_name=Path(script).stem or None,
        )
        batch_script = with_cores(batch_script)
        job = render(batch_script)
    _write(config, text)
    schema = os.path.join(os.path.dirname(config), _SCHEMA)
    _write(schema, json.dumps(json_schema()))
    click.echo(f"{config}: {said}")
    click.echo(f"{schema}: lets editors such as VS Code check and complete {os.path.basename(config)}")
    if not os.path.isfile(script):
        click.echo(f"{script}: does not exist yet; the README has an example")
    if keywords:
        click.echo(f"{script}: set TrainingArguments({keywords})")
    command = f"zlaunch --num_gpus {count} {command_line}"
    if batch_file is not None and job is not None and batch_script is not None:
        _write(batch_file, job)
        click.echo(f"{batch_file}: {nodes} node{'s' * (nodes > 1)} with {count} GPU{'s' * (count > 1)} each")
        warn_of_one_core(batch_script)
        click.echo(f"{batch_file}: runs zlaunch {command_line}")
        command = f"sbatch {batch_file}"
    elif nodes > 1:
        command = f"zlaunch --hostfile hosts --num_gpus {count} {command_line}"
        if not os.path.exists("hosts"):
            click.echo(f"hosts: write one line for each of the {nodes} nodes: NAME slots={count}")
    click.echo(f"then: {command}")


def _has_slurm(partition: str | None, time: str | None) -> bool:
    return bool(partition or time or choose_queue(None) == "slurm")


def _shape(text: str, given: int | None) -> tuple[int, int]:
    """Return the number of nodes and of GPUs per node."""
    found = _SHAPE.fullmatch(text.strip().lower())
    nodes, count = (int(found[1] or given or 1), int(found[2])) if found else (0, 0)
    if not nodes or not count:
        raise LaunchError(f"{text!r} GPUs: write a number, or 2x8 for 2 nodes with 8 GPUs")
    if given not in (None, nodes):
        raise LaunchError(f"--num_gpus {text} and --num_nodes {given} contradict each other")
    return nodes, count


def _config(
    numel: float, nodes: int, count: int, memory: tuple[float, float | None], seq: int, batch: int
) -> tuple[str, str]:
    """Return the text of a config, and what is to be said about it. Raises LaunchError.

    ``memory`` is the memory of a GPU and of a node in GiB; None if the node's is unknown.
    """
    from zlaunch.runtime.memory import choices
    from zlaunch.runtime.memory.activations import of_numbers
    from zlaunch.runtime.memory.estimate import GIB
    from zlaunch.runtime.memory.model import from_numbers
    from zlaunch.runtime.mesh import MeshShape

    axes = MeshShape(nodes * count)
    samples = f'{{\n  "train_batch_size": {batch},  // samples per optimizer step, over all GPUs'
    if not numel:
        lines = (
            samples,
            '  "train_micro_batch_size_per_gpu": 1,  // larger is faster, as long as it fits',
            '  "bf16": {"enabled": true},  // halves parameter memory and traffic',
            '  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},  // set your learning rate',
            '  "zero_optimization": {"stage": 2}  // shard optimizer states and gradients\n}',
        )
        return "\n".join(lines), "stage 2; `zlaunch estimate` finds what fits once you know the size"
    shape = usual_shape(numel)
    if shape is None:
        raise LaunchError(
            f"--params {numel:g}: too few for a transformer; 0 writes a config without an estimate"
        )
    hidden, layers = shape
    gpu_mem, host_mem = memory
    machines = choices.Machines(
        nodes=nodes,
        gpus=count,
        gpu_bytes=int(gpu_mem * GIB),
        host_bytes=None if host_mem is None else int(host_mem * GIB),
        axes=axes,
    )
    sizes = from_numbers(numel, hidden, layers, VOCAB)
    each = batch // (nodes * count)
    best = None
    micro_batch = 1
    for micro in (size for size in range(1, each + 1) if each % size == 0):
        found = choices.compare(sizes, machines, of_numbers(sizes, seq, micro, 2), dtype_bytes=2)
        fitting = choices.fastest_that_fits(found, machines)
        if fitting is None or (best is not None and fitting.choice != best.choice):
            break  # a larger micro-batch is worth less than a faster stage
        best = fitting
        micro_batch = micro
    if best is None:
        plural = "s" * (nodes * count > 1)
        raise LaunchError(
            f"{sizes.name} does not fit on {nodes * count} GPU{plural} of {gpu_mem:g} GiB with any stage or "
            f"offload{'' if host_mem is None else f' to {host_mem:g} GiB a node'}: use more GPUs or a "
            "smaller --seq"
        )
    text = choices.config_text(best, machines, dtype="bf16", micro_batch=micro_batch, axes=axes)
    what = best.choice.name + (" with activation checkpointing" if best.choice.checkpointed else "")
    assumed = f"{layers} layer{'s' * (layers > 1)}, hidden size {hidden:,}, {seq:,} tokens per sample"
    need = f"{best.device / GIB:.1f} GiB of GPU memory per rank"
    host = best.states.total.host * count
    need += f" and {host / GIB:.1f} GiB of host memory per node" if host else ""
    unknown = "; host memory was not checked (--host_mem)" if host and host_mem is None else ""
    said = f"{what}, micro-batch {micro_batch}, {need}, estimated for {assumed}{unknown}"
    return text.replace("{", samples, 1), said


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file}: cannot be written: {error.strerror}") from None
