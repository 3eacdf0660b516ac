"""Collects the weights of a whole model in one file that plain torch can read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ...cut import cut_of
from ...zero import placeholder
from ...zero.hooks import ShardedModel
from ..format.tensor_file import replacing


def consolidated_state_dict(model: ShardedModel, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Collect every parameter and persistent buffer by name, on the CPU; ranks other than 0 get an empty
    dict.

    Collective. One block is gathered at a time. Parameters that are one tensor under two names (tied weights)
    share their storage in the result; no others do.
    """
    module, comm = model.module, model.comm
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    values: dict[str, Tensor] = {}
    for block in model.blocks:
        with model.gathered(block.units):
            for unit in block.units:
                for parameter in unit.parameters:
                    cut = cut_of(parameter)
                    if comm.rank and cut is None:
                        continue
                    whole = parameter.detach() if cut is None else cut.whole(parameter.detach())
                    if comm.rank == 0:
                        values.update(dict.fromkeys(names[id(parameter)], whole.to("cpu", copy=True)))
    if comm.rank != 0:
        return {}
    ordered: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if exclude_frozen and not parameter.requires_grad:
            continue
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
            os.fsync(file.fileno())
