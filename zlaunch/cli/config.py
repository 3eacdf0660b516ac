"""`zlaunch config`: check a config file, show what it means, or print the JSON Schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS

if TYPE_CHECKING:
    from zlaunch.runtime.config import Effective, Loaded

_VALUE = 30
"""Widest value that others are aligned with."""
_WORLD_SIZE: Callable[[Any], Any] = click.option(
    *("--world-size", "--world_size"),
    type=click.IntRange(min=1),
    default=None,
    help="Number of ranks.",
)


@click.group(context_settings=SETTINGS)
def config() -> None:
    """Check and show config files."""


@config.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@_WORLD_SIZE
def check(files: tuple[str, ...], world_size: int | None) -> None:
    """Check each FILE and print all its problems at once.

    With --world-size, also check that the batch sizes fit that number of ranks.
    """
    are_good = True
    for file in files:
        if len(files) > 1:
            click.echo(f"{file}:")
        are_good &= _check(file, world_size)
    if not are_good:
        sys.exit(2)


def _check(file: str, world_size: int | None) -> bool:
    """Print what there is to say about a config file; return False if it has problems."""
    found = _read(file, world_size)
    if found is None:
        return False
    loaded, _ = found
    from zlaunch.plan.checks import is_plain_json
    from zlaunch.runtime.config import fits_no_world, open_values

    if wrong := fits_no_world(loaded):
        click.echo(f"{loaded.origin}: {wrong}", err=True)
        return False
    is_plain = is_plain_json(file)
    left = open_values(loaded)
    if left and not is_plain:
        keys = ", ".join(left)
        click.echo(
            f'{loaded.origin}: {keys}: "auto" is for the Hugging Face Trainer and accelerate, which read '
            "plain JSON: remove comments, bare keys and trailing commas, or set values",
            err=True,
        )
        return False
    if left:
        keys = ", ".join(f"{key} to {value}" for key, value in left.items())
        by = "for the Hugging Face Trainer and accelerate, which fill in"
        click.echo(f'{loaded.origin}: ok {by} "auto"; for your own loop, set {keys}')
    elif is_plain:
        click.echo(f"{loaded.origin}: ok")
    else:
        why = "which read plain JSON: no comments, trailing commas, bare keys or YAML"
        click.echo(
            f"{loaded.origin}: ok for your own loop, not for the Hugging Face Trainer and accelerate, {why}"
        )
    config = loaded.config
    has_size = config.train_batch_size is not None or config.train_micro_batch_size_per_gpu is not None
    if not has_size and loaded.auto.isdisjoint(_BATCH[:2]):
        sizes = " or ".join(_BATCH[:2])
        click.echo(f"{loaded.origin}: no batch size is set: the script has to give {sizes}")
    for path, text in _numbers_as_text(loaded.raw, loaded.config):
        why = f'the Hugging Face Trainer compares it with its arguments as text: write {text}, not "{text}"'
        click.echo(f"warning: {loaded.origin}: {path}: {why}", err=True)
    return True


def _numbers_as_text(raw: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each number that a config has in quotes, which DeepSpeed and zlaunch accept."""
    for key, value in raw.items():
        known = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
        if isinstance(value, Mapping):
            yield from _numbers_as_text(value, known, f"{prefix}{key}.")
        elif (
            isinstance(value, str)
            and value != "auto"
            and isinstance(known, (int, float))
            and not isinstance(known, bool)
        ):
            yield f"{prefix}{key}", value


@config.command()
@click.argument("file")
@_WORLD_SIZE
def show(file: str, world_size: int | None) -> None:
    """Print the values that a run with FILE uses, and where each comes from.

    First the values that FILE sets or that follow from it, then the defaults, then the batch sizes and what
    losses and gradients are divided by.
    """
    from zlaunch.runtime.config import open_lines

    found = _read(file, world_size or 1)
    if found is None:
        sys.exit(2)
    loaded, effective = found
    assert effective is not None
    _warn(open_lines(loaded))
    from zlaunch.runtime.averaging import Averaging
    from zlaunch.runtime.config import find_mesh

    table = effective.table()
    given = [row for row in table if not row[2].startswith("default")]
    _print(f"Set by {loaded.origin} or derived from it:", given)
    click.echo()
    _print("Defaults:", [row for row in table if row[2].startswith("default")])
    mesh = find_mesh(loaded, world_size or 1)
    ranks = f"{mesh.ranks} rank" + ("s" if mesh.ranks > 1 else "")
    axes = " * ".join(f"{name} {size}" for name, size in mesh.axes.items())
    rows = [
        ("parallel axes", axes, "number of ranks and the section parallel"),
        *((key, value, source) for key, value, source in table if key in _BATCH),
        *Averaging.of(effective.config, mesh).table(),
    ]
    click.echo()
    _print(f"On {ranks}{'' if world_size else ' (--world-size N for another number)'}:", rows)


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _read(file: str, world_size: int | None) -> tuple[Loaded, Effective | None] | None:
    """Return a config, and the effective one if there is a number of ranks; print its warnings. Print all
    problems at once and return None if there are any.
    """
    from zlaunch.runtime.config import ConfigError, load, resolve

    warnings: tuple[str, ...] = ()
    try:
        loaded = load(file)
        warnings = loaded.warnings
        effective = resolve(loaded, world_size=world_size) if world_size else None
    except ConfigError as error:
        _warn((*warnings, *error.warnings))
        click.echo(str(error), err=True)
        return None
    _warn(warnings)
    return loaded, effective


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"warning: {line}", err=True)


def _print(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    click.echo(title)
    width = max(len(key) for key, _, _ in rows)
    for key, value, source in rows:
        click.echo(f"  {key:<{width}}  {value:<{_VALUE}}  {source}")


@config.command()
def schema() -> None:
    """Print the JSON Schema, for editors that check as you type."""

    from zlaunch.runtime.config import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
