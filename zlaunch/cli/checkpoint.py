"""`zlaunch checkpoint`: look at checkpoints, check them, and bring weights in and out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from zlaunch.cli.commands import SETTINGS

_TAG = click.option(
    "-t",
    "--tag",
    help='Checkpoint to use; "auto" is the newest undamaged one.  [default: the one in `latest`; in the '
    "output_dir of a Hugging Face Trainer, the newest complete checkpoint-N]",
)


@click.group(context_settings=SETTINGS, short_help="List, verify, export and import checkpoints.")
def checkpoint() -> None:
    """List, verify, export and import checkpoints."""


@contextmanager
def _as_usage_error() -> Iterator[None]:
    """Turn what is wrong with files or arguments into one line for the user."""
    from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise click.UsageError(f"{where}{error.strerror or error}") from None


def _size(nbytes: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.2f} {unit}"
    return f"{nbytes} B"


def _incomplete(problem: str) -> str:
    return f"incomplete ({problem})"


def _warn_of_source(checkpoint: Path) -> None:
    """Warn that a Trainer cannot resume from where the weights come from, or that they are an adapter's."""
    from zlaunch.runtime.checkpoint.trainer_checkpoints import incomplete

    if (problem := incomplete(checkpoint)) is not None:
        click.echo(
            f"zlaunch: warning: {checkpoint.parent} is {_incomplete(problem)}: it has the weights, but the "
            "Trainer cannot resume from it",
            err=True,
        )
    if (checkpoint.parent / "adapter_config.json").is_file():
        click.echo(
            "zlaunch: warning: these are an adapter's weights, under names that PEFT does not read: load "
            f"them with PeftModel.from_pretrained(base, {str(checkpoint.parent)!r})",
            err=True,
        )


def _summary(folder: Path) -> dict[str, Any]:
    """Describe a checkpoint in a line, with damage that can be seen without reading it all."""
    from zlaunch.runtime.checkpoint.format.manifest import read_manifest
    from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError, File

    try:
        manifest = read_manifest(folder)
        away = set()
        for name, entry in manifest["files"].items():
            if entry.get("host") is not None and not (folder / name).exists():
                away.add(entry["host"])
            else:
                File(folder / name, entry).close()
    except CheckpointError as error:
        return {"tag": folder.name, "problem": str(error)}
    return {
        "tag": folder.name,
        "steps": manifest["engine"]["global_steps"],
        "saved": manifest["time"],
        "world_size": manifest["world_size"],
        "stage": manifest["stage"],
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "parts_on": sorted(away),
    }


@checkpoint.command("ls")
@click.argument("folder")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; times are seconds since the epoch.")
def list_(folder: str, as_json: bool) -> None:
    """List the checkpoints in FOLDER, newest first."""
    from zlaunch.runtime.checkpoint.format.manifest import LATEST, candidates, of_trainer
    from zlaunch.runtime.checkpoint.trainer_checkpoints import incomplete, without_checkpoint

    path = Path(folder)
    if not path.is_dir():
        raise click.UsageError(f"{folder}: no such folder")
    with _as_usage_error():
        inner = of_trainer(path)
        paths = {**inner, **{each.name: each for each in candidates(path) if each.name not in inner}}
        found = [
            {**_summary(each), "tag": name, "incomplete": incomplete(each)} for name, each in paths.items()
        ]
        # A Trainer that is killed while it saves leaves a folder without a whole checkpoint of the engine.
        found = [
            *({"tag": name, "incomplete": problem} for name, problem in without_checkpoint(path).items()),
            *found,
        ]
        latest = (path / LATEST).read_text(encoding="utf-8").strip() if (path / LATEST).is_file() else None
    if inner:
        latest = next((each["tag"] for each in found if each["incomplete"] is None), None)
    for each in found:
        each["latest"] = each["tag"] == latest
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    if not found:
        click.echo(f"{folder}: no checkpoints")
        return
    from zlaunch.cli.tables import make_table, stdout_console

    rows = []
    for each in found:
        mark = "latest" if each["latest"] else ""
        if "stage" not in each and "problem" not in each:
            rows.append((each["tag"], _incomplete(each["incomplete"]), "", "", "", "", ""))
            continue
        if "problem" in each:
            rows.append(
                (each["tag"], mark, "", "damaged: " + each["problem"].rpartition(": ")[2], "", "", "")
            )
            continue
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["saved"]))
        if each["incomplete"] is not None:
            mark = _incomplete(each["incomplete"])
        if each["parts_on"]:
            mark = f"{mark} (parts on {', '.join(each['parts_on'])})".strip()
        numbers = (str(each["world_size"]), str(each["stage"]), _size(each["bytes"]))
        rows.append((each["tag"], mark, str(each["steps"]), moment, *numbers))
    columns = ("tag", "", "steps", "saved", "ranks", "stage", "size")
    stdout_console().print(make_table(columns, rows, right=("steps", "ranks", "stage", "size")))


@checkpoint.command()
@click.argument("folder")
@_TAG
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(folder: str, tag: str | None, as_json: bool) -> None:
    """Show the parameters and optimizer states of a checkpoint."""
    from zlaunch.runtime.checkpoint.export.named import open_checkpoint

    with _as_usage_error():
        opened = open_checkpoint(folder, tag)
    manifest = opened.manifest
    rows = [
        {
            "name": name,
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "kind": "trainable" if entry["trainable"] else "frozen",
            "state": [*entry["state"]["tensors"], *entry["state"]["scalars"]],
        }
        for name, entry in opened.parameters.items()
    ]
    rows += [
        {"name": name, "dtype": entry["dtype"], "shape": entry["shape"], "kind": "buffer", "state": []}
        for name, entry in manifest["buffers"].items()
    ]
    rows += [
        {"name": name, "dtype": "", "shape": [], "kind": f"tied to {first}", "state": []}
        for name, first in opened.tied.items()
    ]
    kept = ("written_by", "world_size", "stage", "engine", "optimizer", "scheduler", "client_state")
    head = {"path": str(opened.folder), **{key: manifest[key] for key in kept}}
    if as_json:
        click.echo(json.dumps({**head, "tensors": rows}, indent=1))
        return
    for key, value in head.items():
        text = value if isinstance(value, str) else json.dumps(value)
        click.echo(f"{key:<13} {text if len(text) <= 300 else text[:297] + '...'}")
    from zlaunch.cli.tables import make_table, stdout_console

    cells = []
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or ("scalar" if row["dtype"] else "")
        cells.append((row["name"], row["dtype"], shape, row["kind"], ", ".join(row["state"])))
    stdout_console().print(make_table(("name", "dtype", "shape", "kind", "optimizer state"), cells))


@checkpoint.command()
@click.argument("folder")
@_TAG
@click.option("-a", "--all", "everything", is_flag=True, help="Verify all checkpoints in FOLDER.")
def verify(folder: str, tag: str | None, everything: bool) -> int:
    """Compare a checkpoint with its checksums. Exit code 1 means damage, or an incomplete checkpoint-N."""
    from zlaunch.runtime.checkpoint.export.named import open_checkpoint
    from zlaunch.runtime.checkpoint.format.manifest import candidates, of_trainer, verified
    from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError
    from zlaunch.runtime.checkpoint.trainer_checkpoints import incomplete

    paths = [*of_trainer(Path(folder)).values(), *candidates(Path(folder))] if everything else []
    paths = list(dict.fromkeys(paths))
    if everything and not paths:
        raise click.UsageError(f"{folder}: no checkpoints")
    if not everything:
        with _as_usage_error():
            paths = [open_checkpoint(folder, tag).folder]
    damaged = 0
    for path in paths:
        try:
            size = _size(verified(path)[1])
            if (problem := incomplete(path)) is not None:
                raise CheckpointError(f"{path}: is not whole: {path.parent.name} is {_incomplete(problem)}")
            click.echo(f"{path}: whole, {size} read")
        except CheckpointError as error:
            damaged += 1
            click.echo(f"zlaunch checkpoint verify: error: {error}", err=True)
    return 1 if damaged else 0


@checkpoint.command()
@click.argument("folder")
@click.argument("out")
@_TAG
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Dtype of floating-point tensors.",
)
@click.option("--max_shard_size", metavar="SIZE", help="Largest size of a file.  [default: 5GB]")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "bin", "dcp"]),
    default="safetensors",
    show_default=True,
    help="bin is the format of torch.save; dcp that of torch.distributed.checkpoint, with optimizer state.",
)
@click.option("--exclude_frozen_parameters", is_flag=True, help="Leave out frozen parameters.")
@click.option(
    "--like",
    metavar="DIR",
    help="Hugging Face model to copy config and tokenizer files from.  [default: the files beside the "
    "checkpoint]",
)
def export(
    folder: str,
    out: str,
    tag: str | None,
    like: str | None,
    dtype: str,
    max_shard_size: str | None,
    kind: str,
    exclude_frozen_parameters: bool,
) -> None:
    """Export a checkpoint's weights for Hugging Face or torch.

    It reads the checkpoint in FOLDER and writes the folder OUT. Memory use does not grow with the model. It
    verifies checksums as it reads, and copies a Hugging Face model's config and tokenizer files.
    """
    from zlaunch.runtime.checkpoint.export.full_weights import (
        PRECISIONS,
        companions,
        copy_companions,
        parse_size,
    )
    from zlaunch.runtime.checkpoint.export.full_weights import export as write
    from zlaunch.runtime.checkpoint.export.named import open_checkpoint

    with _as_usage_error():
        opened = open_checkpoint(folder, tag)
        if kind == "dcp":
            if exclude_frozen_parameters:
                raise ValueError(
                    "--exclude_frozen_parameters does not work with --format dcp, which stores "
                    "the whole state"
                )
            if max_shard_size is not None:
                raise ValueError(
                    "--max_shard_size does not work with --format dcp: torch chooses the file sizes"
                )
            from zlaunch.runtime.checkpoint.export.consolidate import export_distributed

            _warn_of_source(opened.folder)
            for path in export_distributed(opened, out, dtype=PRECISIONS[dtype]):
                click.echo(str(path))
            return
        _warn_of_source(opened.folder)
        beside = companions(opened, like)
        before = set(Path(out).iterdir()) if Path(out).is_dir() else set()
        written = write(
            opened,
            out,
            dtype=PRECISIONS[dtype],
            max_shard_bytes=parse_size(max_shard_size or "5GB"),
            kind=kind,
            exclude_frozen=exclude_frozen_parameters,
        )
        written += copy_companions(beside, out, replace=like is not None, dtype=PRECISIONS[dtype])
    for path in written:
        click.echo(str(path))
    if opened.tied and kind == "safetensors":
        alias, kept = next(iter(opened.tied.items()))
        more = f", and {len(opened.tied) - 1} more" if len(opened.tied) > 1 else ""
        text = f"left out: {alias}, which is {kept}{more}; --format bin has tied weights under every name"
        click.echo(text, err=True)
    replaced = sum(Path(path) in before for path in written)
    if replaced:
        click.echo(f"{replaced} of them replaced files of the same name", err=True)


@checkpoint.command("import")
@click.argument("source")
@click.argument("out")
@click.option("-t", "--tag", help="DeepSpeed checkpoint to import.  [default: the one in `latest`]")
@click.option(
    "--as", "name", default="imported", show_default=True, metavar="TAG", help="Tag of the new checkpoint."
)
def import_(source: str, out: str, tag: str | None, name: str) -> None:
    """Convert SOURCE into a checkpoint for engine.load_checkpoint(OUT).

    SOURCE is a checkpoint of DeepSpeed (save_checkpoint with ZeRO 1 to 3, or ds_to_universal), a folder of
    torch.distributed.checkpoint, a Hugging Face folder, a safetensors file, or a state_dict of torch.save. No
    code in it is run.
    """
    from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign
    from zlaunch.runtime.checkpoint.format.manifest import is_checkpoint, latest_tag

    if is_checkpoint(Path(out, name)):
        raise click.UsageError(f"{Path(out, name)} is a checkpoint already: choose another --as or remove it")
    before = latest_tag(Path(out))
    with _as_usage_error():
        found = read_foreign(source, tag)
        path = write_foreign(found, out, name)
    if before not in ("", name):
        click.echo(f"{Path(out, 'latest')} named {before}, and names {name} now", err=True)
    states = {kind for entry in found.parameters.values() for kind in entry.contents} - {"value"}
    with_states = f", with {', '.join(sorted(states))}" if states else ", no optimizer state"
    click.echo(f"{path}: {len(found.parameters)} parameters{with_states}")
    if found.left_out:
        more = f" and {len(found.left_out) - 5} more" if len(found.left_out) > 5 else ""
        names = ", ".join(found.left_out[:5]) + more
        advice = "" if states else "; Migrating from torchrun shows how to keep an optimizer's state"
        click.echo(f"left out: {names}{advice}", err=True)
