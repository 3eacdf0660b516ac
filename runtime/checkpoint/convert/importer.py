"""Converts checkpoints of other programs into ours."""

from __future__ import annotations

import json
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
from ..format.files import FileWriter
from ..format.jsonable import encode
from ..format.manifest import LATEST, VALUE, WHOLE, candidates, is_checkpoint
from ..format.tensor_file import NAMES, CheckpointError
from ..save import rank_file
from ..shard_io import AS_MASTER
from .common import ForeignCheckpoint, load_torch, with_ties
from .deepspeed import find_deepspeed, read_deepspeed
from .distributed import is_distributed, read_distributed
from .universal import find_universal, read_universal

# -- huggingface ------------------------------------------------------------------------------------
#
# Reads weights without other state: torch files, safetensors, Hugging Face folders.


_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_NESTED = ("state_dict", "model_state_dict", "model", "module")


def find_plain(folder: Path) -> list[Path]:
    """Find the files of weights in a folder. Raises CheckpointError if there are none."""
    for name in _INDEXES:
        if (folder / name).exists():
            try:
                names = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()
                return [folder / file for file in dict.fromkeys(names)]
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                raise CheckpointError(f"{folder / name}: is not a weight index: {error}") from None
    for name in _SINGLES:
        if (folder / name).exists():
            return [folder / name]
    raise CheckpointError(
        f"{folder}: no known checkpoint found: neither DeepSpeed's (*_model_states.pt), nor "
        f"{', '.join((*_SINGLES, *_INDEXES))}"
    )


def read_plain(paths: Sequence[Path]) -> ForeignCheckpoint:
    """Read the weights in files, and name what else lies in them. Raises CheckpointError."""
    state: dict[str, Tensor] = {}
    left_out: list[str] = []
    for path in paths:
        tensors, others = _tensors_of(path)
        state |= tensors
        left_out += others
    # The prefix of a model that DistributedDataParallel has wrapped.
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    buffers = {name: tensor for name, tensor in state.items() if not tensor.is_floating_point()}
    parameters, tied = with_ties({name: state[name] for name in state if name not in buffers})
    return ForeignCheckpoint(
        parameters=parameters, buffers=buffers, tied=tied, facts={}, left_out=tuple(left_out)
    )


def _tensors_of(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights in a file, and the names beside them."""
    if not path.exists():
        raise CheckpointError(f"{path}: is missing")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path)), []
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is not a safetensors file: {error}") from None
    state = load_torch(path)
    beside: list[str] = []
    for name in _NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            beside += [str(other) for other in state if other != name]
            state = state[name]
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path}: contains no state_dict")
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"{path}: {others[0]!r} is not a tensor, so this is not a model's state_dict. "
            f"In a file with more than the model, its key is {', '.join(_NESTED[:-1])} or {_NESTED[-1]}"
        )
    return dict(state), beside


# -- importer ---------------------------------------------------------------------------------------


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
    # First, because a universal checkpoint also has DeepSpeed's *_model_states.pt.
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
        # Last: a folder may have both weights of another program and checkpoints of ours.
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
    # See Note [Atomic saves] in format/commit.py.
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
                # In small parts: to() makes a copy, and a tensor may fill half of the memory.
                for part in torch.split(piece.reshape(-1), 1 << 20):
                    writer.write(name, part.to(dtype))
        return {**writer.close(), "host": None}
    finally:
        writer.abandon()
