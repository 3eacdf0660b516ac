"""`zlaunch config`: check a config file, or print the JSON Schema."""

from __future__ import annotations

import sys

import click

from zlaunch.cli.commands import SETTINGS


@click.group(context_settings=SETTINGS)
def config() -> None:
    """Check config files."""


@config.command()
@click.argument("file")
@click.option(
    "--world-size", "--world_size", type=click.IntRange(min=1), default=None, help="Number of ranks."
)
@click.option("--effective", is_flag=True, help="Print every value and where it comes from.")
def check(file: str, world_size: int | None, effective: bool) -> None:
    """Check FILE and print all its problems at once.

    The batch keys are checked when the number of ranks is given.
    """
    from zlaunch.runtime.averaging import Averaging
    from zlaunch.runtime.config import ConfigError, find_mesh, load, open_values, resolve

    warnings: tuple[str, ...] = ()
    try:
        loaded = load(file)
        warnings = loaded.warnings
        resolved = resolve(loaded, world_size=world_size or 1) if world_size or effective else None
    except ConfigError as error:
        for warning in (*warnings, *error.warnings):
            click.echo(f"warning: {warning}")
        click.echo(str(error), err=True)
        sys.exit(2)
    for warning in warnings:
        click.echo(f"warning: {warning}")
    for line in open_values(loaded):
        click.echo(f"warning: {line}")
    if effective and resolved is not None:
        rows = [("key", "value", "source"), *resolved.table()]
        widths = [min(60, max(len(row[column]) for row in rows)) for column in (0, 1)]
        for key, value, source in rows:
            click.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}")
        ranks = f"{world_size} ranks" if world_size else "1 rank (--world-size N for others)"
        click.echo(f"\nOn {ranks}:")
        for name, number, why in Averaging.of(resolved.config, find_mesh(loaded, world_size or 1)).table():
            click.echo(f"{name:<{widths[0]}}  {number:<{widths[1]}}  {why}")
    else:
        under = " under the Hugging Face Trainer or accelerate" if open_values(loaded) else ""
        click.echo(f"{loaded.origin}: ok{under}")


@config.command()
def schema() -> None:
    """Print the JSON Schema, for editors that check as you type."""
    import json

    from zlaunch.runtime.config import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
