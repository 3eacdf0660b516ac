"""Ignore the flags of the `deepspeed` command that zlaunch has no use for, or say what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from zlaunch.launchers.registry import NAMED, SSH

_WITHOUT_EFFECT = ("--no_ssh_check", "--force_multi")
_INSTEAD = {
    "--min_elastic_nodes": (True, "use --min_nodes N, with --max_restarts N"),
    "--max_elastic_nodes": (True, "use --num_nodes N"),
    "--elastic_training": (False, "use --max_restarts N, and --min_nodes N to go on without dead nodes"),
    "--launcher_args": (
        True,
        "zlaunch makes no command line of pdsh, mpirun or srun that they could go to: use --ssh_config, or "
        "#SBATCH lines in the batch script",
    ),
    "--save_pid": (False, "use zlaunch ps, zlaunch stop"),
    "--autotuning": (True, "zlaunch does not search for a config: zlaunch config shows what one means"),
    "--venv_script": (True, "use --venv DIR, the virtual environment on the nodes"),
    "--detect_nvlink_pairs": (False, "the devices are taken as they are: use --include"),
}
"""Flag -> whether it has a value, and the answer."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_ALIASES = {"pdsh": SSH}
_OTHER_LAUNCHERS = ("mpich", "mvapich", "impi")


def deepspeed_flags() -> list[Callable[..., Any]]:
    """Return hidden click options for these flags; only the value of `--log_level` is handed on."""
    found = [click.option(name, is_flag=True, hidden=True, expose_value=False) for name in _WITHOUT_EFFECT]
    found += [click.option(name, **about) for name, about in answered(_INSTEAD, "DeepSpeed's").items()]
    found.append(click.option("--config", hidden=True, expose_value=False, callback=_config, metavar="X"))
    return [*found, click.option("--log_level", type=click.Choice(_LEVELS), default="info", hidden=True)]


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
        raise click.UsageError(f"--config is the script's: put it after the script, SCRIPT --config {value}")


def launcher_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return our name of a launcher; DeepSpeed's default, pdsh, is ssh."""
    name = _ALIASES.get(value.lower(), value.lower()) if value is not None else None
    if name in _OTHER_LAUNCHERS:
        raise click.UsageError(f"--launcher {value}: use ssh, slurm or openmpi, which need no {value}")
    if name is not None and name not in NAMED:
        *others, last = NAMED
        raise click.UsageError(f"--launcher {value}: expected {', '.join(others)} or {last}")
    return name
