"""Reads weights without other state: torch files, safetensors, Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..format.tensor_file import CheckpointError
from .common import ForeignCheckpoint, load_torch, with_ties

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
        raise CheckpointError(f"{path}: {others[0]!r} is not a tensor, so this is not a model's state_dict")
    return dict(state), beside
