"""Take the flags of the `deepspeed` command: accept those without effect, name what replaces the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from zlaunch.cli.commands import option
from zlaunch.launchers.registry import NAMED, SSH

_GROUP = "DeepSpeed's names"
_WITHOUT_EFFECT = ("--no_ssh_check", "--force_multi")
_INSTEAD = {
    "--min_elastic_nodes": (True, "use --min_nodes N, with --max_restarts N"),
    "--max_elastic_nodes": (True, "use --num_nodes N"),
    "--elastic_training": (False, "use --max_restarts N, and --min_nodes N to restart without failed nodes"),
    "--launcher_args": (True, "use --ssh_config FILE for ssh, #SBATCH lines of the batch script for SLURM"),
    "--save_pid": (False, "use `zlaunch ps` and `zlaunch stop`"),
    "--autotuning": (True, "use `zlaunch tune`, which finds the fastest config"),
    "--venv_script": (True, "use --venv DIR, the virtual environment on the nodes"),
    "--detect_nvlink_pairs": (False, "use --include FILTER to choose the GPUs"),
}
"""Flag -> whether it has a value, and the answer."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_ALIASES = {"pdsh": SSH}
_OTHER_LAUNCHERS = ("mpich", "mvapich", "impi")


def deepspeed_flags() -> list[Callable[..., Any]]:
    """Return hidden click options for these flags. Only `--log_level` has a value that the command gets."""
    found = [
        option(
            name, is_flag=True, hidden=True, expose_value=False, group=_GROUP, help="Accepted, has no effect."
        )
        for name in _WITHOUT_EFFECT
    ]
    found += [
        option(name, group=_GROUP, **about) for name, about in answered(_INSTEAD, "DeepSpeed's").items()
    ]
    found.append(
        option(
            "--config",
            hidden=True,
            expose_value=False,
            callback=_config,
            metavar="FILE",
            group=_GROUP,
            help="Not accepted here: it goes after the script.",
        )
    )
    level = option(
        "--log_level",
        type=click.Choice(_LEVELS),
        default="info",
        hidden=True,
        group=_GROUP,
        help="error and critical mean --quiet; the others have no effect.",
    )
    return [*found, level]


def answered(flags: Mapping[str, tuple[bool, str]], owner: str) -> dict[str, dict[str, Any]]:
    """Return click's settings for hidden flags that only get an answer, as a usage error.

    Each flag is mapped to whether it has a value, and to the answer.
    """
    return {
        name: {
            "hidden": True,
            "expose_value": False,
            "is_flag": None if takes_value else True,
            "callback": _refusing(f"{name} is {owner}: {answer}"),
            "metavar": "X" if takes_value else None,
            "help": f"Not accepted: {answer}.",
        }
        for name, (takes_value, answer) in flags.items()
    }


def _refusing(text: str) -> Callable[..., None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            raise click.UsageError(text)

    return callback


def _config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--config belongs to the script: put it after the script, SCRIPT --config {value}"
        )


def take_launcher(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return our name of the launcher that --launcher names."""
    return None if value is None else launcher_name(value, "--launcher")


def launcher_name(value: str, flag: str) -> str:
    """Return our name of a launcher; DeepSpeed's default, pdsh, is ssh. Raises click.UsageError."""
    name = _ALIASES.get(value.lower(), value.lower())
    if name in _OTHER_LAUNCHERS:
        raise click.UsageError(f"{flag} {value}: use ssh, slurm or openmpi, which need no {value}")
    if name not in NAMED:
        *others, last = NAMED
        raise click.UsageError(f"{flag} {value}: expected {', '.join(others)} or {last}")
    return name
