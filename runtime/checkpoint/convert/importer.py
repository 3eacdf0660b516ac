"""Converts checkpoints of other programs into ours."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...offload.transfer import HostLink
from ..format.commit import (
    SaveTarget,
    check_tag,
    new_owner,
    prepare,
    put_in_place,
    replace_file,
    sync_folder,
    write_manifest,
)
from ..format.jsonable import encode
from ..format.manifest import LATEST, VALUE, WHOLE, candidates, is_checkpoint
from ..format.tensor_file import NAMES, CheckpointError
from ..format.writer import FileWriter
from ..save import rank_file
from ..shard_io import AS_MASTER
from .common import ForeignCheckpoint
from .deepspeed import find_deepspeed, read_deepspeed
from .distributed import is_distributed, read_distributed
from .huggingface import find_plain, read_plain
from .universal import find_universal, read_universal

_OURS = "is already a zlaunch checkpoint: load it directly"


def read_foreign(source: str | os.PathLike[str], tag: str | None = None) -> ForeignCheckpoint:
    """Find out which program wrote ``source``, and read it. Raises CheckpointError for an unknown format."""
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if is_checkpoint(path.parent if path.is_file() else path):
        raise CheckpointError(f"{path}: {_OURS}")
    if path.is_file():
        return read_plain([path])
    universal = find_universal(path, tag)
    if universal is not None:
        return read_universal(universal)
    if is_distributed(path):
        return read_distributed(path)
    folder = find_deepspeed(path, tag)
    if folder is not None:
        return read_deepspeed(folder)
    try:
        return read_plain(find_plain(path))
    except CheckpointError:
        if candidates(path):
            raise CheckpointError(f"{path}: {_OURS}") from None
        raise


def write_foreign(
    checkpoint: ForeignCheckpoint, folder: str | os.PathLike[str], tag: str = "imported", rank: int = 0
) -> Path:
    """Write a checkpoint as ``folder/tag``, whole or not at all, make it the latest, and return the path.
    Raises CheckpointError, OSError.
    """
    folder = Path(os.path.abspath(folder))
    check_tag(tag)
    target = SaveTarget(folder=folder, tag=tag, leader=True, owner=new_owner())
    prepare(target)
    temporary = target.temporary
    try:
        _write_into(checkpoint, temporary, rank)
        put_in_place(temporary, folder / tag)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    replace_file(folder / LATEST, tag.encode())
    sync_folder(folder)
    return folder / tag


def _write_into(checkpoint: ForeignCheckpoint, folder: Path, rank: int) -> None:
    from zlaunch import __version__

    file = rank_file(rank)
    own = {
        f"{name}.{kind}": (dtype, (math.prod(entry.shape),), pieces)
        for name, entry in checkpoint.parameters.items()
        for kind, (dtype, pieces) in entry.contents.items()
    }
    tensors: dict[str, Tensor] = {}
    facts = {name: encode(value, tensors, name) for name, value in checkpoint.facts.items()}
    whole = {**tensors, **{f"buffer.{name}": value for name, value in checkpoint.buffers.items()}}
    files = {
        file: _write_file(folder / file, own),
        WHOLE: _write_file(folder / WHOLE, {n: (t.dtype, tuple(t.shape), [t]) for n, t in whole.items()}),
    }
    manifest = {
        "world_size": 1,
        "written_by": {"zlaunch": __version__, "torch": str(torch.__version__)},
        "stage": 0,
        "engine": {"global_steps": 0, "micro_steps": 0, "global_samples": 0, "skipped_steps": 0},
        "loss_scaler": None,
        "optimizer": None,
        "scheduler": None,
        "data": None,
        "config": None,
        "client_state": {},
        **facts,
        "rank_states": [],
        "parameters": {
            name: {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "trainable": entry.trainable,
                "group": entry.group,
                "state": {
                    "tensors": {
                        k: AS_MASTER if dtype == entry.contents[VALUE][0] else NAMES[dtype]
                        for k, (dtype, _) in entry.contents.items()
                        if k != VALUE
                    },
                    "scalars": dict(entry.scalars),
                },
                "slices": [[file, name, 0, 0, math.prod(entry.shape)]],
            }
            for name, entry in checkpoint.parameters.items()
        },
        "excluded": [],
        "tied": dict(checkpoint.tied),
    }
    write_manifest(folder, manifest, whole, files)


def _write_file(
    path: Path, contents: Mapping[str, tuple[torch.dtype, tuple[int, ...], Sequence[Tensor]]]
) -> dict[str, Any]:
    """Write tensors, given as dtype, shape and consecutive pieces; return the file's manifest entry."""
    announced = {name: (dtype, shape) for name, (dtype, shape, _) in contents.items()}
    writer = FileWriter(path, announced, HostLink(torch.device("cpu"), pin=False))
    try:
        for name, (dtype, _, pieces) in contents.items():
            for piece in pieces:
                for part in torch.split(piece.reshape(-1), 1 << 20):
                    writer.write(name, part.to(dtype))
        return {**writer.close(), "host": None}
    finally:
        writer.abandon()
