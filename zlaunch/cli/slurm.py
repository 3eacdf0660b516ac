"""`zlaunch slurm`: make an sbatch file, or submit one."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, SUBCOMMANDS, Group, with_options
from zlaunch.errors import LaunchError

if TYPE_CHECKING:
    from zlaunch.slurm.script import BatchScript

_GROUP_SETTINGS = {**SETTINGS, "token_normalize_func": lambda token: token.replace("_", "-")}
_SETTINGS = {"allow_interspersed_args": False}

_OPTIONS = (
    click.option(
        "-N", "--nodes", type=int, default=1, show_default=True, metavar="N", help="Number of nodes."
    ),
    click.option("--gpus-per-node", "--gpus", metavar="N", help="GPUs of each node: 8 or a100:8."),
    click.option(
        "-c", "--cpus-per-task", type=int, metavar="N", help="Cores of each node, for all its workers."
    ),
    click.option("-t", "--time", metavar="TIME", help="Time limit: 90 (minutes), 24:00:00, 2-12:00:00."),
    click.option("-p", "--partition", metavar="NAME", help="Partition of the cluster."),
    click.option("-A", "--account", metavar="NAME", help="Account to charge."),
    click.option("--qos", metavar="NAME", help="Quality of service."),
    click.option("--array", metavar="LIST", help="Job array: 0-9, 1,3 or 0-99%4."),
    click.option("-J", "--job-name", metavar="NAME", help="Name of the job.  [default: the script's]"),
    click.option("--output", metavar="FILE", help="SLURM's output file: %x-%j.out.  [default: slurm-%j.out]"),
    click.option("--container", metavar="IMAGE", help="Image to run in, by enroot and pyxis."),
    click.option("--load", "modules", multiple=True, metavar="NAME", help="Module to load; may be repeated."),
    click.option(
        "--setup", multiple=True, metavar="LINE", help="Line of shell before the start; may be repeated."
    ),
    click.option("--venv", metavar="DIR", help="Virtual environment to activate."),
    click.option("--python", metavar="FILE", help="Interpreter for zlaunch.  [default: zlaunch on PATH]"),
    click.option(
        "--signal", metavar="SIG@SECONDS", help="Signal to zlaunch before the time limit: USR1@120."
    ),
    click.option("--requeue", is_flag=True, help="Let SLURM start the job again after a preemption."),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help='Any other option of sbatch: "--nice=5"; may be repeated.',
    ),
    click.option("--zlaunch-args", metavar="ARGS", help='Options of zlaunch: "--log_ranks all".'),
)


@click.group(cls=Group, context_settings=_GROUP_SETTINGS)
def slurm() -> None:
    """Make and submit SLURM batch files."""


@slurm.command(context_settings=_SETTINGS)
@with_options(_OPTIONS)
@click.option("-o", "--write", "file", metavar="FILE", help="Write it there instead of printing it.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def script(command: tuple[str, ...], file: str | None, **options: Any) -> None:
    """Print the sbatch file that runs SCRIPT with zlaunch.

    Options before SCRIPT are SLURM's; everything after it is the script's.
    """
    _check_given(command)
    text = _render(_batch_script(command, options))
    if file is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
        return
    try:
        Path(file).write_bytes(text)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"-o {file}: {getattr(error, 'strerror', None) or error}") from None


@slurm.command(context_settings=_SETTINGS)
@with_options(_OPTIONS)
@click.option("-f", "--follow", is_flag=True, help="Show the output until the job has ended.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def submit(command: tuple[str, ...], follow: bool, **options: Any) -> int:
    """Submit SCRIPT, or an existing FILE.sbatch, and print the job's id.

    With --follow the exit code is 0 only if the job completed.
    """
    from zlaunch.slurm.commands import submit as hand_over

    _check_given(command)
    if follow and options["array"] is not None:
        raise click.UsageError("--follow goes with one job, not with --array")
    if command[0].endswith(".sbatch"):
        _check_existing(command, options)
        job_id = hand_over(command[0])
    else:
        job_id = _submit_script(command, options)
    click.echo(job_id)
    return _follow(job_id) if follow else 0


def _check_given(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise click.UsageError("no script given; see zlaunch slurm --help")


def _batch_script(command: tuple[str, ...], options: dict[str, Any]) -> BatchScript:
    import shlex

    from zlaunch.slurm.script import BatchScript

    name, *args = command
    try:
        zlaunch_args = tuple(shlex.split(options["zlaunch_args"] or ""))
    except ValueError as error:
        raise click.UsageError(f"--zlaunch-args {options['zlaunch_args']!r}: {error}") from None
    job_name = options["job_name"] or Path(name).stem or None
    return BatchScript(
        script=name,
        script_args=tuple(args),
        **{**options, "zlaunch_args": zlaunch_args, "job_name": job_name},
    )


def _render(batch: BatchScript) -> bytes:
    from zlaunch.slurm.script import render

    return os.fsencode(render(batch))


def _submit_script(command: tuple[str, ...], options: dict[str, Any]) -> str:
    from zlaunch.plan.checks import check_script
    from zlaunch.slurm.commands import submit as hand_over

    batch = _batch_script(command, options)
    if not {"--module", "--no_python", "--no-python"} & set(batch.zlaunch_args):
        check_script(command[0], SUBCOMMANDS)
    with tempfile.TemporaryDirectory(prefix="zlaunch-") as folder:  # sbatch keeps a copy
        path = Path(folder, f"{Path(command[0]).stem or 'job'}.sbatch")
        path.write_bytes(_render(batch))
        return hand_over(path)


def _check_existing(command: tuple[str, ...], options: dict[str, Any]) -> None:
    if not os.path.isfile(command[0]):
        raise click.UsageError(f"no file {command[0]!r}")
    if len(command) > 1 or any(value not in (None, (), False, 1) for value in options.values()):
        raise click.UsageError(f"{command[0]}: options and arguments of a finished file belong into the file")


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
        ended = queue.follow(job_id, path, write)
    except SlurmError as error:
        raise LaunchError(f"job {job_id}: {error}") from None
    click.echo(f"zlaunch: job {job_id}: {ended}", err=True)
    return 0 if ended == "COMPLETED" else 1
