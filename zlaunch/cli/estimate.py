"""`zlaunch estimate`: say what a model needs at every stage and offload, and which config fits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zlaunch.cli.commands import SETTINGS, Command, count_option, with_options
from zlaunch.cli.model_shape import VOCAB, shape_advice, usual_shape
from zlaunch.runtime.optimizer_specs import ESTIMATED, listed

if TYPE_CHECKING:
    from zlaunch.runtime.memory.activations import Activations
    from zlaunch.runtime.memory.choices import Estimated, Machines
    from zlaunch.runtime.memory.model import ModelSizes
    from zlaunch.runtime.memory.step_time import Operations, Speeds, StepTime
    from zlaunch.runtime.mesh import MeshShape


# -- estimate axes ----------------------------------------------------------------------------------
#
# Read for `zlaunch estimate` how many ranks share layers, sequences, experts and stages.


AXES = (
    count_option("--tensor", default=1, show_default=True, help="Tensor-parallel size."),
    count_option("--sequence", default=1, show_default=True, help="Sequence-parallel size."),
    count_option("--pipeline", default=1, show_default=True, help="Pipeline stages."),
    count_option("--expert", default=1, show_default=True, help="Expert-parallel size."),
)
"""Options of the command, in the order of its help."""


def given_axes(
    world_size: int,
    seq: int,
    tensor: int,
    sequence: int,
    pipeline: int,
    expert: int,
    *,
    simulate: bool,
    has_input: bool,
) -> MeshShape:
    """Return the mesh of the options. Raises click.UsageError for sizes that do not go with the number of
    ranks, or with other options.
    """
    from zlaunch.runtime.mesh import MeshShape

    sizes = {"--tensor": tensor, "--sequence": sequence, "--pipeline": pipeline, "--expert": expert}
    given = [name for name, size in sizes.items() if size > 1]
    product = math.prod(sizes.values())
    if given and simulate:
        raise click.UsageError(
            f"--simulate does not model the communication of {given[0]}: remove one of the two"
        )
    if seq % sequence:
        raise click.UsageError(f"--seq {seq} cannot be divided by --sequence {sequence}")
    if sequence > 1 and has_input:
        raise click.UsageError(
            "--sequence cannot be combined with --input: pass one rank's share of the sequence in --input"
        )
    if world_size % product:
        shown = ", ".join(f"{name} {sizes[name]}" for name in given)
        raise click.UsageError(f"{shown}: needs a multiple of {product} GPUs, not {world_size}")
    return MeshShape(world_size // product, expert, sequence, tensor, pipeline)


# -- estimate speeds --------------------------------------------------------------------------------
#
# Read the speeds for `zlaunch estimate --simulate` from its options and from files of measurements.


def _speed(name: str, metavar: str, text: str) -> Callable[..., Any]:
    kind = click.FloatRange(min=0, min_open=True)
    return click.option(name, type=kind, metavar=metavar, help=f"{text}, for --simulate.")


SPEEDS = (
    click.option(
        "--simulate", is_flag=True, help="Add a lower bound of the step time, from measured speeds."
    ),
    _speed("--tflops", "TFLOPS", "Matrix-product speed of a GPU"),
    _speed("--link", "GB/S", "Bus bandwidth of collectives, from `zlaunch bench net`"),
    _speed("--host_link", "GB/S", "Bandwidth between a GPU and host memory, per direction"),
    _speed("--host_bandwidth", "GB/S", "Host memory bandwidth of a node"),
    _speed("--nvme_read", "GB/S", "Read bandwidth of a node's drives, from `zlaunch bench io`"),
    _speed("--nvme_write", "GB/S", "Write bandwidth of a node's drives"),
    click.option(
        "--measured",
        multiple=True,
        metavar="FILE",
        help="Output of `zlaunch bench net --json` or `bench io --json`; repeatable.",
    ),
)
"""Options of the command, in the order of its help."""
_FIELDS = {
    "tflops": ("compute", 1e12),
    "link": ("link", 1e9),
    "host_link": ("host_link", 1e9),
    "host_bandwidth": ("host_memory", 1e9),
    "nvme_read": ("nvme_read", 1e9),
    "nvme_write": ("nvme_write", 1e9),
}
"""Maps an option to the field of Speeds, and to its unit."""


def given_speeds(simulate: bool, files: Sequence[str], options: Mapping[str, float | None]) -> Speeds:
    """Return the speeds of files and options, of which the options count. Raises click.UsageError."""
    given = {name: value for name, value in options.items() if value is not None}
    if not simulate and (given or files):
        name = next(iter(given), "measured")
        raise click.UsageError(f"--{name} goes with --simulate")
    from dataclasses import replace

    from zlaunch.runtime.errors import MemoryPlanError
    from zlaunch.runtime.memory.step_time import speeds_of_reports

    try:
        read = speeds_of_reports({file: _report(file) for file in files})
    except MemoryPlanError as error:
        raise click.UsageError(f"--measured: {error}") from None
    return replace(read, **{_FIELDS[name][0]: value * _FIELDS[name][1] for name, value in given.items()})


def _report(file: str) -> Any:
    try:
        with open(file, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as error:
        raise click.UsageError(f"--measured {file}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--measured {file} is not JSON: {error}") from None


def missing_text(times: Sequence[StepTime]) -> str:
    """Return which options the rows without a time need, empty where none does."""
    lacking = {name for time in times for name in time.missing}
    names = [f"--{option}" for option, (field, _) in _FIELDS.items() if field in lacking]
    return f"?: not known without {', '.join(names)}" if names else ""


# -- estimate ---------------------------------------------------------------------------------------


_MISSING = "give MODEL with --input, --hf_config, or --params"
_LEAST_COLUMNS = 130
_LARGE_LOGITS = 0.25
"""The part of checkpointed activations from which on logits are named, if they take a GiB."""
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def number(text: str) -> float:
    """Read a number of 1 or more, also with K, M, B or T behind it."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise click.BadParameter(f"{text!r} is not a number of at least 1, such as 13e9 or 13B")
    return number


def _is_number(text: str) -> bool:
    try:
        number(text)
    except click.BadParameter:
        return False
    return True


_STATES = ", ".join(f"{name} {len(spec.states)}" for name, spec in ESTIMATED.items())


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("model", required=False)
@click.option(
    "--hf_config", metavar="PATH", help="Hugging Face config.json, its folder, or a model's name on the Hub."
)
@click.option("--params", type=number, metavar="N", help="Parameters of a transformer: 13e9 or 13B.")
@count_option("--hidden", help="Hidden size, for --params.  [default: guessed from --params]")
@count_option("--layers", help="Number of layers, for --params.  [default: guessed from --params]")
@count_option("--vocab", help=f"Vocabulary size, for --params.  [default: {VOCAB}]")
@count_option("--num_nodes", "--nodes", "nodes", default=1, show_default=True, help="Nodes.")
@count_option("--num_gpus", "--gpus", "gpus", default=1, show_default=True, help="GPUs per node.")
@with_options(AXES)
@click.option("--gpu_mem", type=click.FloatRange(min=0.1), metavar="GIB", help="Memory of a GPU.")
@click.option("--host_mem", type=click.FloatRange(min=0.1), metavar="GIB", help="Host memory of a node.")
@count_option("--seq", default=2048, show_default=True, help="Tokens per sample.")
@count_option("--micro_batch", default=1, show_default=True, help="Samples per forward pass on a GPU.")
@click.option("--input", "shape", metavar="SHAPE", help="Shape of MODEL's input: 8,3,224,224 or 8,128:int64.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast"]),
    default="bf16",
    show_default=True,
    help="Compute dtype; autocast means fp32 parameters under torch.autocast.",
)
@click.option(
    "--optimizer",
    type=click.Choice(list(ESTIMATED), case_sensitive=False),
    default="AdamW",
    show_default=True,
    help=f"States per parameter: {_STATES} (with momentum).",
)
@click.option(
    "--state_dtype",
    type=click.Choice(["fp32", "bf16", "int8"]),
    default="fp32",
    show_default=True,
    help="Config key optimizer.params.state_dtype.",
)
@click.option(
    "--master_weights",
    type=click.Choice(["fp32", "stochastic"]),
    default="fp32",
    show_default=True,
    help="Config key bf16.master_weights, with one micro-batch per step.",
)
@click.option(
    "--step_in_backward",
    is_flag=True,
    help="Config key step_in_backward, for stages 2 and 3 without offload.",
)
@click.option(
    "--tiled_loss",
    is_flag=True,
    help="Config key activation_checkpointing.tiled_loss: no logits of whole sequences.",
)
@click.option(
    "--for",
    "goal",
    type=click.Choice(["fits"], case_sensitive=False),
    help="Print the config of the fastest choice that fits, with reasons.",
)
@click.option("--trainer", is_flag=True, help="With --for fits: a config for the Hugging Face Trainer.")
@with_options(SPEEDS)
@click.option("--plot", metavar="FILE", help="Draw the memory per GPU to FILE, such as memory.png.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def estimate(
    model: str | None,
    hf_config: str | None,
    params: float | None,
    hidden: int | None,
    layers: int | None,
    vocab: int | None,
    nodes: int,
    gpus: int,
    tensor: int,
    sequence: int,
    pipeline: int,
    expert: int,
    gpu_mem: float | None,
    host_mem: float | None,
    seq: int,
    micro_batch: int,
    shape: str | None,
    dtype: str,
    optimizer: str,
    state_dtype: str,
    master_weights: str,
    step_in_backward: bool,
    tiled_loss: bool,
    goal: str | None,
    trainer: bool,
    simulate: bool,
    measured: tuple[str, ...],
    plot: str | None,
    as_json: bool,
    **speeds: float | None,
) -> None:
    """Estimate the memory per GPU to train a model.

    It shows every ZeRO stage and offload. MODEL is a function that builds the module, as
    package.module:function or file.py:function; it is built without memory. With --params, the estimate is
    for a transformer.

    --simulate adds a lower bound of a step's time with one micro-batch, from measured speeds.
    """
    if model is not None and _is_number(model):
        raise click.UsageError(f"{model!r} is a number of parameters: use --params {model}")
    if sum(given is not None for given in (model, hf_config, params)) != 1:
        raise click.UsageError("pass MODEL, --hf_config or --params, such as --params 7B")
    for name, value, needs in (
        *(("--hidden", hidden, params), ("--layers", layers, params), ("--vocab", vocab, params)),
        ("--input", shape, model),
    ):
        if value is not None and needs is None:
            raise click.UsageError(f"{name} goes with {'MODEL' if name == '--input' else '--params'}")
    for name in ("seq", "micro_batch"):
        given = click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT
        if given and model is not None:
            raise click.UsageError(f"--{name} cannot be combined with MODEL, whose --input gives all sizes")
    if (hidden is None) != (layers is None):
        raise click.UsageError("--hidden and --layers require each other")
    if goal and gpu_mem is None:
        raise click.UsageError("--for fits needs --gpu_mem")
    if goal and (simulate or plot):
        raise click.UsageError("--for fits only prints a config: remove --simulate and --plot")
    if trainer and not goal:
        raise click.UsageError("--trainer needs --for fits, which prints a config")
    if trainer and pipeline > 1:
        raise click.UsageError(
            f"--pipeline {pipeline} cannot be combined with --trainer: the Trainer has no pipelines. Remove "
            "one of the two"
        )
    if trainer and sequence > 1:
        taken = f'ParallelismConfig(sp_size={sequence}, sp_backend="deepspeed")'
        raise click.UsageError(
            f"--sequence {sequence} cannot be combined with --trainer: the Trainer does not read it from the "
            f"config. Remove one of the two, and pass TrainingArguments(parallelism_config={taken})"
        )
    if step_in_backward and dtype.startswith("fp16"):
        raise click.UsageError(
            "--step_in_backward cannot be combined with fp16, whose steps may have to be skipped"
        )
    if tiled_loss and pipeline > 1:
        raise click.UsageError("--tiled_loss cannot be combined with --pipeline: stages compute whole logits")
    if master_weights == "stochastic" and dtype != "bf16":
        raise click.UsageError(f"--master_weights stochastic needs --dtype bf16, and it is {dtype}")
    for name, is_narrow in (
        (f"--state_dtype {state_dtype}", state_dtype != "fp32"),
        ("--master_weights stochastic", master_weights == "stochastic"),
    ):
        if is_narrow and not ESTIMATED[optimizer].has_kernel:
            others = listed([other for other, spec in ESTIMATED.items() if spec.has_kernel], "and")
            raise click.UsageError(f"{name} works with {others}, not with {optimizer}")
    known = given_speeds(simulate, measured, speeds)
    axes = given_axes(
        nodes * gpus, seq, tensor, sequence, pipeline, expert, simulate=simulate, has_input=shape is not None
    )
    if plot:
        check_plot(plot)
    from zlaunch.runtime.errors import MemoryPlanError
    from zlaunch.runtime.log import set_level
    from zlaunch.runtime.memory import choices
    from zlaunch.runtime.memory.activations import AUTOCAST, of_numbers
    from zlaunch.runtime.memory.estimate import GIB
    from zlaunch.runtime.memory.fake_step import computing_in, of_module, parse_shape
    from zlaunch.runtime.memory.model import from_function, from_hugging_face, from_numbers, of_one_rank
    from zlaunch.runtime.memory.step_time import step_time, work_of_module, work_of_numbers
    from zlaunch.runtime.memory.trainer_config import as_command_line, trainer_config

    set_level("error")  # what a model says while it is built belongs in no table
    if dtype in AUTOCAST and params is not None:
        raise click.UsageError(f"--dtype {dtype} needs a model: MODEL or --hf_config, not --params")
    kind, around = computing_in(dtype)
    machines = choices.Machines(
        nodes=nodes,
        gpus=gpus,
        gpu_bytes=None if gpu_mem is None else int(gpu_mem * GIB),
        host_bytes=None if host_mem is None else int(host_mem * GIB),
        axes=axes,
    )
    own_seq = seq // sequence
    notes = []
    if params is not None:
        guessed = []
        if hidden is None and (guess := usual_shape(params)) is not None:
            hidden, layers = guess
            guessed.append(f"{layers} layers of hidden size {hidden:,} (--layers, --hidden)")
        if vocab is None and hidden is not None:
            vocab = VOCAB
            guessed.append(f"vocabulary {vocab:,} (--vocab)")
        if guessed:
            notes.append(f"shape guessed from --params: {', '.join(guessed)}")
    try:
        if params is not None:
            sizes = from_numbers(params, hidden, layers, vocab)  # with what was guessed of them
            own = of_one_rank(sizes, axes)
            activations = of_numbers(
                sizes, own_seq, micro_batch, kind.itemsize, tensor, tiled_loss=tiled_loss
            )
        else:
            sizes = from_function(model) if model is not None else from_hugging_face(str(hf_config))
            if sizes.positions is not None and seq > sizes.positions:
                text = f"zlaunch estimate: the model has {sizes.positions:,} positions, --seq is {seq:,}"
                click.echo(text, err=True)
            own = of_one_rank(sizes, axes)
            activations = of_module(own, own_seq, micro_batch, kind, shape, around, tiled_loss=tiled_loss)
            if shape is not None:
                micro_batch = parse_shape(shape)[0][0]
        work: Operations | None = None
        if simulate and params is not None:
            work = work_of_numbers(sizes, seq, micro_batch)
        elif simulate:
            work = work_of_module(sizes, seq, micro_batch, kind, shape)
            if work is None:
                raise click.UsageError("--simulate needs the operations of MODEL: give --input")
    except MemoryPlanError as error:
        raise click.UsageError(str(error)) from None
    if tiled_loss and activations is None:
        raise click.UsageError(f"--tiled_loss changes the activations, which are not known: {_MISSING}")
    logits = 0
    if activations is not None and not (tiled_loss or shape or pipeline > 1):
        logits = large_logits(sizes, activations, own_seq * micro_batch, kind.itemsize)
    notes += shape_advice(sizes.hidden, sizes.vocab)
    kept = choices.Bits(state_dtype, optimizer, master_weights == "stochastic")
    found = choices.compare(
        own, machines, activations, dtype_bytes=kind.itemsize, steps_in_backward=step_in_backward, kept=kept
    )
    times = []
    if work is not None:
        times = [step_time(sizes, machines, each.choice, work, known, kind.itemsize) for each in found]
    if plot:
        write_plot(plot, _title(sizes, machines), found, machines)
    if as_json or goal:
        for note in notes:
            click.echo(f"zlaunch estimate: {note}", err=True)
    if as_json:
        more = [] if work is None else [time.as_dict(work, machines.world_size) for time in times]
        click.echo(choices.as_json(found, machines, more))
        return
    if goal:
        if activations is None:
            raise click.UsageError(f"--for fits needs the activations: {_MISSING}")
        if host_mem is None:
            click.echo("zlaunch estimate: host memory was not checked: give --host_mem", err=True)
        if shape is None:
            larger = "zlaunch init finds the largest that fits"
            click.echo(f"zlaunch estimate: for --micro_batch {micro_batch}; {larger}", err=True)
        best = choices.fastest_that_fits(found, machines)
        if best is None:
            narrows = ESTIMATED[optimizer].has_kernel
            steps = ESTIMATED[optimizer].needs == "element"
            smaller = [
                text
                for text, is_given in (
                    ("--state_dtype int8", state_dtype == "int8" or not narrows),
                    ("--master_weights stochastic", kept.stochastic or dtype != "bf16" or not narrows),
                    ("--step_in_backward", step_in_backward or dtype.startswith("fp16") or not steps),
                    ("--tiled_loss", not logits),
                )
                if not is_given
            ]
            also = f"; {', '.join(smaller)} make it smaller" if smaller else ""
            if kept.is_narrow:
                also += "; NVMe was not tried, where all numbers are fp32: leave out --state_dtype and "
                also += "--master_weights for it"
            least = min(found, key=lambda each: each.device)
            ckpt = " and activation checkpointing" if least.choice.checkpointed else ""
            host = least.states.total.host * gpus / GIB
            needs = choices.need_text(least, machines) + (
                f", and {host:.1f} GiB of host memory per node" * (host > 0)
            )
            raise click.ClickException(
                f"{sizes.name} does not fit on {_count(machines.world_size)} with any stage and offload. The "
                f"least GPU memory is with {least.choice.name}{ckpt}: {needs}. Use more GPUs, a smaller "
                f"--micro_batch or --seq{also}"
            )
        text = choices.config_text(
            best,
            machines,
            dtype=dtype,
            micro_batch=micro_batch,
            axes=axes,
            kept=kept,
            tiled_loss=tiled_loss,
        )
        if trainer:
            # the Trainer's config is plain JSON, without the comments that give the reasons
            chosen = best.choice.name + (", activation checkpointing" if best.choice.checkpointed else "")
            why = f"{chosen}: {choices.need_text(best, machines)}; {choices.reason_text(best)}"
            click.echo(f"zlaunch estimate: {why}", err=True)
            text, arguments = trainer_config(text, machines.world_size)
            needed = f"--deepspeed FILE {as_command_line(arguments)}"
            click.echo(f"zlaunch estimate: the Trainer's arguments for this config: {needed}", err=True)
        click.echo(text)
        return
    batch = f"--input {shape}" if model is not None else f"{micro_batch} x {seq:,} tokens"
    together = tensor * sequence * pipeline
    whose = "a GPU" if together == 1 else f"for {together} GPUs together"
    states = "" if state_dtype == "fp32" else f" with state in {state_dtype}"
    masters = ", stochastic masters" if kept.stochastic else ""
    assumed = f"{dtype}{masters}, {optimizer}{states}" + (
        "" if model is not None and shape is None else f", {batch} {whose}"
    )
    _show(sizes, machines, activations, found, times, work, assumed, logits)
    for note in notes:
        click.echo(note)
    if plot:
        click.echo(f"drawn: {plot}")


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus > 1)}"


def large_logits(sizes: ModelSizes, activations: Activations, tokens: int, dtype_bytes: int) -> int:
    """Return the bytes of logits that a tiled loss would save much of; 0 where they are few, or where a
    Hugging Face model does not take one.
    """
    from zlaunch.runtime.memory.activations import logits_bytes
    from zlaunch.runtime.memory.estimate import GIB

    if sizes.vocab is None:
        return 0
    nbytes = logits_bytes(tokens, sizes.vocab, dtype_bytes, chunked=sizes.is_language_model)
    least = activations.plain if activations.checkpointed is None else activations.checkpointed
    is_large = nbytes >= GIB and nbytes >= _LARGE_LOGITS * least
    return nbytes if is_large and sizes.takes_tiled_loss else 0


def _title(sizes: ModelSizes, machines: Machines) -> str:
    axes = machines.axes.axes
    shown = f" ({', '.join(f'{name} {size}' for name, size in axes.items())})" if len(axes) > 1 else ""
    return f"{sizes.name}: {sizes.numel:,} parameters, {_count(machines.world_size)}{shown}"


def _show(
    sizes: ModelSizes,
    machines: Machines,
    activations: Activations | None,
    found: Sequence[Estimated],
    times: Sequence[StepTime],
    work: Operations | None,
    assumed: str,
    logits: int,
) -> None:
    """Print the table and what it means; ``logits``: bytes of logits that a tiled loss would save."""
    from rich.text import Text

    from zlaunch.cli.tables import make_table, stdout_console
    from zlaunch.runtime.memory.estimate import GIB
    from zlaunch.runtime.offload.manager import Tier

    unit, size = ("GiB", GIB) if max(each.device for each in found) >= GIB else ("MiB", 2**20)

    def shown(nbytes: int | None) -> str:
        return "?" if nbytes is None else f"{nbytes / size:.1f}"

    parts = ("parameters", "gradients", "optimizer")
    columns = ["", "ckpt.", "param.", "grad.", "optim.", "activ.", "GPU", "host", "NVMe"]
    rows = []
    for i, each in enumerate(found):
        fits = each.fits(machines)
        states = each.states
        cells = [each.choice.name, "yes" if each.choice.checkpointed else "no"]
        amounts = [getattr(states, part).device for part in parts]
        amounts += [each.activations, each.device, states.total.host, states.total.disk]
        cells += [shown(amount) for amount in amounts]
        style = "" if fits is None else "green" if fits else "dim"
        if machines.gpu_bytes is not None:
            cells.append("?" if fits is None else "fits" if fits else "no")
        if work is not None:
            cells += times[i].cells(work, machines.world_size)
        rows.append([Text(cell, style=style) for cell in cells])
    columns += [] if machines.gpu_bytes is None else ["fits"]
    speed = [] if work is None else ["s/step", f"{work.unit}/s"]
    columns += [*speed, *(["bound by"] if work is not None else [])]
    title = f"{_title(sizes, machines)}; {assumed}; {unit} of a rank"
    numbers = [*columns[2:9], *speed]
    stdout_console(_LEAST_COLUMNS).print(make_table(columns, rows, title=title, right=numbers, whole=numbers))
    source = f"not known: {_MISSING}" if activations is None else activations.source
    click.echo(f"activations: {source}; ckpt.: every block is checkpointed")
    if machines.axes.pipeline > 1:
        click.echo(
            f"a rank is of the stage with most parameters. It keeps {machines.axes.pipeline} micro-batches "
            "at a time, each in its layers alone: counted are the activations of one in all layers. ZeRO's "
            "stages 2 and 3 do not go with a pipeline"
        )
    if sizes.build is None and sizes.layers is None:
        click.echo("stages 2 and 3 take more than they would: the model is one block; --hidden and --layers")
    if any(each.choice.stage == 3 and each.choice.optimizer is not Tier.DEVICE for each in found):
        click.echo("parameters at stage 3: gathered blocks and, where fp32 values are offloaded, own shards")
    if machines.gpu_bytes is not None:
        reserved = machines.reserved_bytes / GIB
        buffers = ", for NCCL's buffers" if machines.world_size > 1 else ""
        click.echo(
            f"fits: with {reserved:.1f} GiB for CUDA itself{buffers} and what the allocator cannot use"
        )
    if machines.gpu_bytes is not None and machines.host_bytes is None:
        click.echo("host memory was not checked: give --host_mem")
    if logits:
        click.echo(
            f"{logits / GIB:.1f} GiB of the activations are logits: --tiled_loss estimates without them"
        )
    if work is not None:
        click.echo("s/step: the least time of a step with one micro-batch, if all that can overlap does")
    if lacking := missing_text(times):
        click.echo(lacking)


# -- estimate plot ----------------------------------------------------------------------------------
#
# Draw what `zlaunch estimate` has found: the memory of a GPU at every stage and offload.


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
        whom = "CUDA and NCCL" if machines.world_size > 1 else "CUDA itself"
        parts[whom] = [machines.reserved_bytes] * len(found)
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
