"""`zlaunch slurm`: make an sbatch file, or submit one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, SUBCOMMANDS, Group, option, with_options
from zlaunch.errors import LaunchError

if TYPE_CHECKING:
    from zlaunch.slurm.script import BatchScript

_SETTINGS = {"allow_interspersed_args": False}

_OPTIONS = (
    option(
        "--num_nodes", "--nodes", "-N", "nodes", type=int, default=1, metavar="N", help="Nodes.  [default: 1]"
    ),
    option(
        "--num_gpus",
        "--gpus_per_node",
        "--gpus",
        "gpus_per_node",
        metavar="N",
        help="GPUs per node: 8 or a100:8.",
    ),
    option(
        "-c",
        "--cpus_per_task",
        type=int,
        metavar="N",
        help="CPU cores per node, for all its workers.  [default: the GPUs' share of a node, if sinfo tells]",
    ),
    option("-t", "--time", metavar="TIME", help="Time limit: 90 (minutes), 24:00:00, 2-12:00:00."),
    option("-p", "--partition", metavar="NAME", help="Partition of the cluster."),
    option("-A", "--account", metavar="NAME", help="Account to charge."),
    option("--qos", metavar="NAME", help="Quality of service."),
    option("--array", metavar="LIST", help="Job array: 0-9, 1,3 or 0-99%4."),
    option("-J", "--job_name", metavar="NAME", help="Name of the job.  [default: the script's name]"),
    option(
        "--output",
        metavar="FILE",
        help="Output file of the job, such as logs/%x-%j.out. zlaunch creates its folder.  "
        "[default: slurm-%j.out]",
    ),
    option("--container", metavar="IMAGE", help="Container image to run in, with enroot and pyxis."),
    option(
        "--load", "modules", multiple=True, metavar="NAME", help="Environment module to load; repeatable."
    ),
    option("--setup", multiple=True, metavar="LINE", help="Shell line to run before the start; repeatable."),
    option("--venv", metavar="DIR", help="Virtual environment to activate."),
    option("--python", metavar="FILE", help="Python that runs zlaunch.  [default: zlaunch on PATH]"),
    option(
        "--signal",
        metavar="SIG@SECONDS",
        help="Signal that SLURM sends this many seconds before the time limit: USR1@120.",
    ),
    option(
        "--requeue",
        is_flag=True,
        help="Requeue the job when it has saved before its time limit (--signal), or after a preemption or "
        "node failure. The run then saves at SIGTERM, too.",
    ),
    option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help='Any other option of sbatch, such as "--nice=5"; repeatable.',
    ),
    option("--zlaunch_args", metavar="ARGS", help='Options of zlaunch, such as "--log_ranks all".'),
)


@click.group(cls=Group, context_settings=SETTINGS)
def slurm() -> None:
    """Write and submit SLURM batch files."""


@slurm.command(context_settings=_SETTINGS)
@with_options(_OPTIONS)
@click.option("-o", "--write", "file", metavar="FILE", help="Write the file instead of printing it.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def script(command: tuple[str, ...], file: str | None, **options: Any) -> None:
    """Print the sbatch file that runs SCRIPT with zlaunch.

    Options before SCRIPT are SLURM's. Everything after SCRIPT goes to the script.
    """
    _check_given(command)
    batch = _batch_script(command, options)
    text = _render(batch)
    if file is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
    else:
        try:
            Path(file).write_bytes(text)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"-o {file}: {getattr(error, 'strerror', None) or error}") from None
    if _is_script(batch) and not os.path.exists(batch.script):
        _warn(
            f"no file {batch.script!r} on this machine; the job needs it in the folder where it is submitted"
        )
    warn_of_options(batch)


@slurm.command(context_settings=_SETTINGS)
@with_options(_OPTIONS)
@click.option("-f", "--follow", is_flag=True, help="Show the job's output until it ends.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def submit(command: tuple[str, ...], follow: bool, **options: Any) -> int:
    """Submit SCRIPT, or an existing FILE.sbatch, and print the job's id.

    With --follow, the exit code is 0 if the job completed.
    """
    from zlaunch.slurm.commands import submit as hand_over

    _check_given(command)
    if follow and options["array"] is not None:
        raise click.UsageError(
            "--follow works with one job, not with --array: `zlaunch logs -f RUN` follows a task"
        )
    if command[0].endswith(".sbatch"):
        _check_existing(command, options)
        job_id = hand_over(command[0])
    else:
        job_id = _submit_script(command, options)
    click.echo(job_id)
    return _follow(job_id) if follow else 0


def _check_given(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise click.UsageError("no script given: zlaunch slurm script [OPTIONS] SCRIPT [ARGS]")


def _check_own_options(own: Sequence[str], command: Sequence[str]) -> None:
    """Raise UsageError for options of --zlaunch_args that the job would be refused for, after its wait."""
    from zlaunch.cli.commands import message_of
    from zlaunch.cli.run import run

    try:
        run.make_context("zlaunch", [*own, *command])
    except click.UsageError as error:
        raise click.UsageError(f"--zlaunch_args: {message_of(error)}") from None
    except click.exceptions.Exit:  # --help, --version
        raise click.UsageError(f"--zlaunch_args {' '.join(own)!r}: starts no run") from None


def _batch_script(command: tuple[str, ...], options: dict[str, Any]) -> BatchScript:
    import shlex

    from zlaunch.slurm.script import BatchScript

    name, *args = command
    try:
        zlaunch_args = tuple(shlex.split(options["zlaunch_args"] or ""))
    except ValueError as error:
        raise click.UsageError(f"--zlaunch_args {options['zlaunch_args']!r}: {error}") from None
    _check_own_options(zlaunch_args, command)
    job_name = options["job_name"] or Path(name).stem or None
    batch = BatchScript(
        script=name,
        script_args=tuple(args),
        **{**options, "zlaunch_args": zlaunch_args, "job_name": job_name},
    )
    return with_cores(batch)


def with_cores(batch: BatchScript) -> BatchScript:
    """Return the file with its number of CPU cores if sinfo tells it: the GPUs' share of a node's."""
    from zlaunch.slurm.commands import node_sizes
    from zlaunch.slurm.script import cores_of

    if batch.cpus_per_task is not None or batch.gpus_per_node is None or _is_exclusive(batch):
        return batch
    return replace(batch, cpus_per_task=cores_of(batch.gpus_per_node, node_sizes(batch.partition)))


def warn_of_one_core(batch: BatchScript) -> None:
    """Tell the user where a file asks for no number of cores: SLURM then gives each node's task one."""
    if batch.cpus_per_task is None and not _is_exclusive(batch):
        _warn(
            "SLURM may give each node a single CPU core. Ask for more: --cpus_per_task N of "
            "`zlaunch slurm script`, or #SBATCH --cpus-per-task=N in the file"
        )


def warn_of_options(batch: BatchScript, *, asks_for_gpus: bool = True) -> None:
    """Tell the user what is probably wrong with a file. The cluster may have what this machine lacks.
    `asks_for_gpus`: --num_gpus always means GPUs, also in a cluster without any.
    """
    from zlaunch.slurm.script import signal_is_too_early

    if batch.venv is not None and not os.path.isfile(os.path.join(batch.venv, "bin", "activate")):
        _warn(
            f"--venv {batch.venv}: no bin/activate there on this machine; the job fails if its node has none"
        )
    if signal_is_too_early(batch):
        _warn(
            f"--signal {batch.signal} and --time {batch.time}: the job gets the signal as soon as it starts. "
            "Give fewer seconds, or more time"
        )
    if not _warn_of_partition(batch):
        _warn_of_nodes(batch)
        if asks_for_gpus or batch.gpus_per_node is not None:
            _warn_of_gpus(batch)
    warn_of_one_core(batch)


def _warn_of_partition(batch: BatchScript) -> bool:
    """Tell the user that the cluster has no such partition, as far as sinfo tells it; return whether."""
    from zlaunch.slurm.commands import partitions

    known = partitions() if batch.partition is not None else []
    # sbatch takes several, one of which the job gets.
    missing = [name for name in (batch.partition or "").split(",") if known and name not in known]
    if missing:
        _warn(f"--partition {', '.join(missing)}: this cluster has {', '.join(known)}")
    return bool(missing)


def _warn_of_nodes(batch: BatchScript) -> None:
    """Tell the user where a job asks for more nodes than there are, as far as sinfo tells it."""
    from zlaunch.slurm.commands import count_nodes

    most = count_nodes(batch.partition) if batch.nodes > 1 else None
    if most is not None and batch.nodes > most:
        _warn(f"--num_nodes {batch.nodes}: {_where(batch)} has fewer nodes; the maximum is {most}")


def _where(batch: BatchScript) -> str:
    return "the default partition" if batch.partition is None else f"partition {batch.partition}"


def _warn_of_gpus(batch: BatchScript) -> None:
    """Tell the user where a job asks for no GPU, or for more than a node has, as far as sinfo tells it."""
    from zlaunch.slurm.commands import node_sizes

    if batch.gpus_per_node is None:
        if not any("gpu" in line or "gres" in line for line in batch.sbatch):
            _warn("the job asks for no GPU, and trains on the CPU: --num_gpus N asks for N on each node")
        return
    count = int(str(batch.gpus_per_node).rpartition(":")[2])
    most = max((gpus for _, gpus in node_sizes(batch.partition)), default=count)
    if count > most:
        asked = f"--num_gpus {batch.gpus_per_node}"
        _warn(f"{asked}: no node of {_where(batch)} has that many GPUs; the maximum is {most}")


def _warn(text: str) -> None:
    click.echo(f"zlaunch: warning: {text}", err=True)


def _is_script(batch: BatchScript) -> bool:
    """Return whether zlaunch runs a Python file, not a module or a program."""
    return not {"--module", "--no_python", "--no-python"} & set(batch.zlaunch_args)


def _is_exclusive(batch: BatchScript) -> bool:
    """Return whether the job gets all cores of its nodes."""
    return any(line.startswith(("--exclusive", "-c", "--cpus-per")) for line in batch.sbatch)


def _render(batch: BatchScript) -> bytes:
    """Return the text of the file, and create the folder of the job's output: SLURM does not."""
    from zlaunch.slurm.script import output_folder, render

    text = os.fsencode(render(batch))
    if (folder := output_folder(batch)) is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.UsageError(f"--output {batch.output}: {folder}: {error.strerror}") from None
    return text


def _submit_script(command: tuple[str, ...], options: dict[str, Any]) -> str:
    from zlaunch.plan.checks import check_script
    from zlaunch.slurm.commands import submit as hand_over

    batch = _batch_script(command, options)
    if _is_script(batch):
        check_script(command[0], SUBCOMMANDS)
    with tempfile.TemporaryDirectory(prefix="zlaunch-") as folder:  # sbatch keeps a copy
        path = Path(folder, f"{Path(command[0]).stem or 'job'}.sbatch")
        path.write_bytes(_render(batch))
        warn_of_options(batch)  # before sbatch refuses the job, and says less of why
        return hand_over(path, shown=f"the job of {command[0]}")


def _check_existing(command: tuple[str, ...], options: dict[str, Any]) -> None:
    if not os.path.isfile(command[0]):
        raise click.UsageError(f"no file {command[0]!r}")
    if len(command) > 1 or any(value not in (None, (), False, 1) for value in options.values()):
        raise click.UsageError(f"{command[0]}: options and arguments of a finished file belong in the file")


def _follow(job_id: str) -> int:
    from zlaunch.slurm import commands as queue
    from zlaunch.slurm.environment import SlurmError

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    path = queue.find_output(job_id) or Path(f"slurm-{job_id}.out")
    click.echo(f"zlaunch: following {path}; Ctrl-C leaves the job alone, scancel {job_id} ends it", err=True)
    sys.stdout.flush()
    try:
        ended = queue.follow(job_id, path, write, say=lambda text: click.echo(f"zlaunch: {text}", err=True))
    except SlurmError as error:
        raise LaunchError(f"job {job_id}: {error}") from None
    click.echo(f"zlaunch: job {job_id}: {ended}{_why_not_started(job_id, ended)}", err=True)
    return 0 if ended == "COMPLETED" else 1


def _why_not_started(job_id: str, ended: str) -> str:
    """Return what to add where SLURM could not start a job, which then has no output; else ""."""
    from zlaunch.slurm import commands as queue

    if ended != "FAILED" or queue.reason(job_id) != "JobLaunchFailure":
        return ""
    folder = queue.work_folder(job_id)
    return f" (JobLaunchFailure): does the folder {folder} exist on the nodes, and can you write there?"
