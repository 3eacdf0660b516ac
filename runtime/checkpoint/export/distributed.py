"""Writes a checkpoint as torch.distributed.checkpoint does (DCP), with the optimizer's state."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format.jsonable import decode
from ..format.manifest import VALUE, WHOLE, Checkpoint
from ..format.tensor_file import DTYPES, CheckpointError, bytes_of
from ..shard_io import AS_MASTER

_PIECE_NUMEL = 1 << 20
_NAMES = ("*.distcp", ".metadata")
_CHOICES = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options that say how torch computes; its optimizers want to find them."""


def export_distributed(
    checkpoint: Checkpoint, out: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> list[Path]:
    """Write the folder ``out`` for ``torch.distributed.checkpoint.load``, and return the files.

    The keys are ``model`` and, where there is state, ``optim``: what
    ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns. Floating weights are cast to
    ``dtype``; the optimizer's state keeps its own. Needs twice the size on the disk for a while, no memory.

    Raises OSError, and CheckpointError where ``out`` has such files already.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    stale = [path.name for pattern in _NAMES for path in out.glob(pattern)]
    if stale:
        raise CheckpointError(
            f"{out}: already has a torch checkpoint ({stale[0]}): remove it, or use another folder"
        )
    plan = list(_plan(checkpoint, dtype))
    needed = 2 * sum(bytes_of(kind, shape) for *_, kind, shape in plan)
    if shutil.disk_usage(out).free < needed:  # writing to mapped memory would kill the process
        raise OSError(errno.ENOSPC, f"no space left: the export needs {needed:,} bytes temporarily", str(out))
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as folder:
        model: dict[str, Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        for number, (name, kind, to, shape) in enumerate(plan):
            tensor = _mapped(Path(folder, str(number)), checkpoint, name, kind, to, shape)
            if kind == VALUE:
                model[name] = tensor
            else:
                states.setdefault(name, {})[kind] = tensor
        model |= {alias: model[name] for alias, name in checkpoint.tied.items() if name in model}
        saved: dict[str, Any] = {"model": model}
        if states:
            saved["optim"] = _optimizer(checkpoint, states)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            save(saved, storage_writer=FileSystemWriter(out))
    return sorted(path for pattern in _NAMES for path in out.glob(pattern))


def _plan(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> Iterator[tuple[str, str, torch.dtype, tuple[int, ...]]]:
    """Return what is written: a name, what of it, its dtype and its shape."""
    for name, own, shape in checkpoint.weights():
        yield name, VALUE, dtype if own.is_floating_point else own, shape
        state = checkpoint.parameters.get(name, {"state": {"tensors": {}}})["state"]["tensors"]
        for kind, stored in state.items():
            wide = torch.promote_types(own, torch.float32)
            yield name, kind, wide if stored == AS_MASTER else DTYPES[stored], shape


def _mapped(
    path: Path, checkpoint: Checkpoint, name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Read a tensor into a file that is mapped as memory."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype)
    whole = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
    for start in range(0, numel, _PIECE_NUMEL):
        piece = whole[start : start + _PIECE_NUMEL]
        if kind == VALUE:
            checkpoint.weight_into(piece, name, start)
        else:
            checkpoint.read_into(piece, name, kind, start)
    return whole.view(shape)


def _optimizer(checkpoint: Checkpoint, states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the optimizer's state dict by the parameters' names, as torch describes it."""
    entry = decode(checkpoint.manifest["optimizer"], checkpoint.file(WHOLE).read_whole) or {}
    groups: list[dict[str, Any]] = [dict(group) for group in entry.get("groups") or [{}]]
    for group in groups:
        group |= {"params": [], **{key: group.get(key, value) for key, value in _CHOICES.items()}}
    for name, own in states.items():
        described = checkpoint.parameters[name]
        for key, (dtype, value) in described["state"]["scalars"].items():
            own[key] = torch.tensor(value, dtype=DTYPES[dtype]) if dtype else value
        groups[min(described["group"], len(groups) - 1)]["params"].append(name)
    return {"state": states, "param_groups": groups}
