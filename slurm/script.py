"""Make sbatch files from typed values. Pure: `render` gives the text, nothing is written or run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zlaunch.slurm.environment import SlurmError

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|(?i:infinite|unlimited)", re.ASCII)
_INDICES = r"\d+(-\d+(:\d+)?)?"
_ARRAY = re.compile(rf"{_INDICES}(,{_INDICES})*(%\d+)?", re.ASCII)
_GPUS = re.compile(r"([A-Za-z0-9_.-]+:)?[1-9]\d{0,3}", re.ASCII)
_SIGNAL = re.compile(r"(?:B:)?((?:[A-Z][A-Z0-9]*|\d{1,2})(?:@\d{1,5})?)", re.ASCII)
_SIGNAL_S = 60
"""Seconds before the time limit of a `--signal` without a number."""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)

_SIGNAL_COMMENT = """\
# SLURM sends this signal only to the batch shell. exec replaces the shell with zlaunch, which then gets
# the signal.
"""
_EXEC_COMMENT = "# exec replaces the shell with zlaunch, so that SLURM's signals reach zlaunch.\n"
_IMAGE_COMMENT = """\
# The workers run in this image: pyxis reads it when zlaunch calls srun. zlaunch itself runs outside it.
"""
_LEFT_OVER = """\
# Variables of an enclosing job step would mislead srun and zlaunch.
unset ${!SLURM_STEP_*} ${!SLURM_CPU_BIND*}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """Holds the values of an sbatch file. Raises SlurmError on a value that sbatch or bash would misread."""

    script: str
    """What zlaunch runs; a module or a program where ``zlaunch_args`` say so."""
    script_args: tuple[str, ...] = ()
    zlaunch_args: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int | str | None = None
    """GPUs of each node: `4` or `a100:4`."""
    cpus_per_task: int | None = None
    """Cores of each node: there is one task a node, and it starts all workers there."""
    time: str | None = None
    """Time limit: `MINUTES`, `H:M:S`, `D-H:M:S`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    job_name: str | None = None
    output: str | None = None
    """File for the output; %j is the job's id, %x its name. SLURM does not create its folder."""
    container: str | None = None
    """An image for enroot and pyxis."""
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """Lines of shell, as they are, before zlaunch starts."""
    venv: str | None = None
    """Folder of a virtual environment to activate."""
    python: str | None = None
    """Interpreter that runs zlaunch; without it the `zlaunch` on PATH is run."""
    signal: str | None = None
    """Signal before the time limit, and how many seconds: `USR1@120`."""
    requeue: bool = False
    """Let SLURM start the job again after a preemption or a failed node."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, as they are: `--nice=5`."""
    line: str | None = None
    """A line of shell that takes this shell's place, instead of the one that runs zlaunch."""

    def __post_init__(self) -> None:
        for option, number in (("num_nodes", self.nodes), ("cpus_per_task", self.cpus_per_task)):
            if number is not None and number < 1:
                raise SlurmError(f"--{option} {number}: must be at least 1")
        for option, value, form, example in (
            ("num_gpus", self.gpus_per_node, _GPUS, "8 or a100:8"),
            ("time", self.time, _TIME, "90, 24:00:00 or 2-12:00:00"),
            ("array", self.array, _ARRAY, "0-9, 1,3,5 or 0-99%4"),
            ("signal", self.signal, _SIGNAL, "USR1@120"),
        ):
            if value is not None and not form.fullmatch(str(value)):
                raise SlurmError(f"--{option} {str(value)!r}: write it as {example}")
        for option in ("partition", "account", "qos", "job_name", "output", "container"):
            text = getattr(self, option)
            if text is not None and not (text and text.isprintable()):
                raise SlurmError(f"--{option} {text!r}: must be one line of text without control characters")
        for line in self.sbatch:
            if not line.startswith("-") or not line.isprintable():
                raise SlurmError(f"--sbatch {line!r}: write one sbatch option on one line, such as --nice=5")
        if not self.script or self.script.startswith("-"):
            raise SlurmError(f"expected a script, got {self.script!r}")
        for option, word in self._words():
            if "\0" in word or "\r\n" in word:
                raise SlurmError(
                    f"{option} {word!r}: sbatch takes no file with a zero byte or a Windows line end"
                )

    def _words(self) -> Iterator[tuple[str, str]]:
        """Yield everything that becomes shell text, with the option it comes from."""
        for option, words in (
            ("--load", self.modules),
            ("--setup", self.setup),
            ("--venv", (self.venv or "",)),
            ("--python", (self.python or "",)),
            ("--zlaunch_args", self.zlaunch_args),
            ("script argument", (self.script, *self.script_args)),
        ):
            for word in words:
                yield option, word


def time_limit_s(text: str) -> float:
    """Return a time limit in seconds, as sbatch reads it: `MINUTES`, `M:S`, `H:M:S`, `D-H`, `D-H:M:S`.

    Raises SlurmError.
    """
    if not _TIME.fullmatch(text) or not text[0].isdecimal():
        raise SlurmError(f"--time {text!r}: write it as 90, 24:00:00 or 2-12:00:00")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours = 0
        (minutes, seconds) = (*parts, 0)[:2]
    found = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if not found:
        raise SlurmError(f"--time {text!r}: must be more than 0")
    return float(found)


def signal_is_too_early(batch: BatchScript) -> bool:
    """Return whether SLURM would send the signal at the job's start, because the time limit is no longer."""
    if batch.signal is None or batch.time is None or not batch.time[0].isdecimal():
        return False
    seconds = int(batch.signal.partition("@")[2] or _SIGNAL_S)
    return seconds >= time_limit_s(batch.time)


def cores_of(gpus: int | str, nodes: Sequence[tuple[int, int]]) -> int | None:
    """Return the GPUs' share of a node's CPU cores, given the cores and GPUs of the partition's nodes.

    Of different nodes the smallest share counts. None where no node has that many GPUs.
    """
    wanted = int(str(gpus).rpartition(":")[2])
    return min((max(1, cores * wanted // has) for cores, has in nodes if has >= wanted), default=None)


def output_folder(batch: BatchScript) -> Path | None:
    """Return the folder of the job's output, which SLURM does not create; None where there is none.

    Raises SlurmError where its name is not known before the job runs.
    """
    folder = Path(batch.output or "").parent
    name = str(folder).replace("%x", batch.job_name or "%x").replace("%%", "%")
    if re.search(r"%\d*[A-Za-z]", name):
        raise SlurmError(
            f"--output {batch.output}: SLURM does not create folders, and {folder} is known only when the "
            "job runs: use % only in the file name"
        )
    return None if name == "." else Path(name)


def render(batch: BatchScript) -> str:
    """Return the text of the sbatch file."""
    sbatch = "".join(f"#SBATCH {line}\n" for line in _sbatch_lines(batch))
    blocks = [
        f"#!/bin/bash\n{sbatch}",
        f"set -euo pipefail\n\n{_LEFT_OVER}{_environment(batch)}",
        _activation(batch),
        (_SIGNAL_COMMENT if batch.signal else _EXEC_COMMENT) + f"exec {batch.line or command_line(batch)}\n",
    ]
    return "\n".join(filter(None, blocks))


def _sbatch_lines(batch: BatchScript) -> Iterator[str]:
    signal = _SIGNAL.fullmatch(batch.signal or "")
    # In a container around the batch script there is no srun, which more than one node needs.
    container = batch.container if batch.nodes == 1 else None
    for option, value in (
        ("job-name", batch.job_name),
        ("partition", batch.partition),
        ("account", batch.account),
        ("qos", batch.qos),
        ("array", batch.array),
        ("nodes", batch.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", batch.gpus_per_node),
        ("cpus-per-task", batch.cpus_per_task),
        ("time", batch.time),
        ("output", batch.output),
        ("container-image", container),
        ("signal", f"B:{signal[1]}" if signal else None),
    ):
        if value is not None:
            yield f"--{option}={_sbatch_quote(str(value))}"
    if batch.requeue:
        yield "--requeue"
        yield "--open-mode=append"
    yield from batch.sbatch


def _sbatch_quote(value: str) -> str:
    """Quote a value in an #SBATCH line, where a backslash escapes inside either kind of quotes."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _environment(batch: BatchScript) -> str:
    text = ""
    if batch.cpus_per_task is not None:
        text += "# srun does not inherit --cpus-per-task from sbatch.\n"
        text += f'export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-{batch.cpus_per_task}}}"\n'
    if batch.container is not None and batch.nodes > 1:
        text += f"{_IMAGE_COMMENT}export PYXIS_CONTAINER_IMAGE={shlex.quote(batch.container)}\n"
    return text


def _activation(batch: BatchScript) -> str:
    lines = [f"module load {shlex.join(batch.modules)}"] if batch.modules else []
    if batch.venv is not None:
        lines.append(f"source {shlex.quote(f'{batch.venv}/bin/activate')}")
    lines += batch.setup
    if not lines:
        return ""
    comment = "# Modules and activation scripts may read unset variables."
    return "\n".join([comment, "set +u", *lines, "set -u", ""])


def command_line(batch: BatchScript) -> str:
    """Return the line of shell that runs zlaunch."""
    program = [batch.python, "-m", "zlaunch"] if batch.python else ["zlaunch"]
    requeue = ["--requeue"] * batch.requeue
    return shlex.join([*program, *requeue, *batch.zlaunch_args, batch.script, *batch.script_args])
