"""Collects the weights of a whole model in one file that plain torch can read."""

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

from ...comm.shard_spec import spec_of
from ...zero import placeholder
from ...zero.hooks import ShardedModel
from ..format.jsonable import decode
from ..format.manifest import VALUE, WHOLE, Checkpoint
from ..format.tensor_file import DTYPES, CheckpointError, bytes_of, from_json, replacing
from ..shard_io import AS_MASTER

# -- consolidate ------------------------------------------------------------------------------------


def consolidated_state_dict(model: ShardedModel, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Collect every parameter and persistent buffer by name, on the CPU; ranks other than 0 get an empty
    dict.

    Collective. One block is gathered at a time. Parameters that are one tensor under two names (tied weights)
    share their storage in the result; no others do.
    """
    module = model.module
    comm = model.comm
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    values: dict[str, Tensor] = {}
    for block in model.blocks:
        with model.gathered(block.units):
            for unit in block.units:
                for parameter in unit.parameters:
                    spec = spec_of(parameter)
                    if comm.rank and spec is None:
                        continue
                    # unshard() is collective for the ranks that share the parameter, so all of them call it.
                    # Only rank 0 keeps the result.
                    whole = parameter.detach() if spec is None else spec.unshard(parameter.detach())
                    if comm.rank == 0:
                        values.update(dict.fromkeys(names[id(parameter)], whole.to("cpu", copy=True)))
    if comm.rank != 0:
        return {}
    ordered: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if exclude_frozen and not parameter.requires_grad:
            continue
        # Parameters of integers are in no unit, and whole on every rank.
        managed = placeholder.owner(parameter) is not None
        ordered[name] = values[name] if managed else parameter.detach().to("cpu", copy=True)
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                ordered[f"{prefix}.{name}" if prefix else name] = buffer.detach().to("cpu", copy=True)
    return ordered


def save_weights(model: ShardedModel, directory: str, filename: str, *, exclude_frozen: bool = False) -> Path:
    """Write ``directory/filename`` on rank 0; ``.safetensors`` names get that format, others
    ``torch.save``'s.

    The file appears whole or not at all. Collective; a failure to write raises OSError, with one text on all
    ranks.
    """
    state = consolidated_state_dict(model, exclude_frozen=exclude_frozen)
    path = Path(directory) / filename
    problem = None
    if model.comm.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(state, path)
        except Exception as error:  # torch and safetensors raise different errors for a full disk
            problem = f"cannot write {path}: {str(error).partition(chr(10))[0]}"
    problem = model.comm.exchange(problem)[0]
    if problem:
        raise OSError(problem)
    return path


def _write(state: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as temporary:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            seen: set[int] = set()
            unique = {}
            for name, value in state.items():
                # save_file() refuses tensors that share memory: a tied weight is written under its first
                # name.
                if not value.numel() or value.data_ptr() not in seen:
                    seen.add(value.data_ptr())
                    unique[name] = value
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(unique, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)  # the library makes the file private, whatever the umask
        else:
            torch.save(state, temporary)
        with open(temporary, "rb") as file:
            # Before replacing() renames it: a power loss must not leave the name with half of the content.
            os.fsync(file.fileno())


# -- distributed ------------------------------------------------------------------------------------
#
# Writes a checkpoint as torch.distributed.checkpoint does (DCP), with the optimizer's state.


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
        for name, entry in checkpoint.parameters.items():
            if name in model and entry["state"]["scalars"]:
                states.setdefault(name, {})  # some have no tensor of their size
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
    # DCP wants all tensors at the same time. Mapped files are memory that the system can write back.
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
            own[key] = from_json(dtype, value)
        groups[min(described["group"], len(groups) - 1)]["params"].append(name)
    return {"state": states, "param_groups": groups}
