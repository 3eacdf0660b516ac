"""Reads DeepSpeed's universal checkpoints, which its ds_to_universal makes (layout of version 0.19).

``zero/<parameter>/`` has a file for the value, ``fp32.pt``, and one for each entry of the optimizer's state:
a tensor, or a dict with it as "param". ``zero/optimizer_state.pt`` has the rest, and the files of the model's
states are those of the checkpoint that it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format.manifest import VALUE
from ..format.tensor_file import NAMES, CheckpointError
from .common import Foreign, ForeignCheckpoint, load_torch
from .deepspeed import ALLOWED, assemble, by_rank, frozen_of

_LATEST = "latest_universal"
_PARTS = "zero"


def find_universal(path: Path, tag: str | None) -> Path | None:
    """Return the folder of the universal checkpoint that ``path`` and ``tag`` mean; None if there is none."""
    if tag is None and (path / _LATEST).is_file():
        tag = (path / _LATEST).read_text(encoding="utf-8").strip()
    folder = path / tag if tag is not None else path
    return folder if (folder / _PARTS).is_dir() and any(folder.glob("*_model_states.pt")) else None


def read_universal(folder: Path) -> ForeignCheckpoint:
    """Read the files. Raises CheckpointError for missing parts, pipeline parallelism and experts.

    With model parallelism, whose parameters are whole here, all of them have to be trained ones.
    """
    for pattern, what in (("layer_*-model_*", "pipeline parallelism"), ("*expert*", "experts (MoE)")):
        if any(folder.glob(pattern)):
            raise CheckpointError(f"{folder}: was saved with {what}, which cannot be imported")
    parts = folder / _PARTS
    models = [load_torch(path, ALLOWED) for path in by_rank(folder, "_model_states.pt")]
    state = load_torch(parts / "optimizer_state.pt", ALLOWED)
    first = models[0]
    stage = int(getattr(state.get("zero_stage"), "value", state.get("zero_stage") or 0))
    inner = state.get("optimizer_state_dict", state)
    counters = inner.get("state", {})
    parameters = {
        name: _read(parts / name, tuple(shape), group, counters.get(group, counters.get(0, {})))
        for group, members in enumerate(first["param_shapes"])
        for name, shape in members.items()
    }
    # Otherwise a parameter whose file has been lost would begin with a moment of zero, without a word.
    _check_complete(parts, parameters)
    # With model parallelism, a model file has only one rank's part of a frozen parameter.
    if any(folder.glob("*mp_rank_01_*")):
        known = {*parameters, *(first.get("shared_params") or {}), *first["buffer_names"]}
        rest = [name for name, value in first["module"].items() if name not in known and value is not None]
        if rest:
            raise CheckpointError(
                f"{folder}: {rest[0]} is frozen and split by model parallelism, which cannot be imported"
            )
        first = {**first, "frozen_param_shapes": None}
    parameters |= frozen_of(first, _fragments(first, models, stage))
    return assemble(first, stage, parameters, state.get("loss_scaler"), inner)


def _check_complete(parts: Path, parameters: Mapping[str, Foreign]) -> None:
    """Raise CheckpointError if a parameter lacks a file that another one of its group has."""
    wanted: dict[int, dict[str, None]] = {}
    for entry in parameters.values():
        wanted.setdefault(entry.group, {}).update(dict.fromkeys((*entry.contents, *entry.scalars)))
    for name, entry in parameters.items():
        for key in wanted[entry.group]:
            if key not in entry.contents and key not in entry.scalars:
                raise CheckpointError(f"{parts / name / key}.pt: is missing, but exists for other parameters")


def _fragments(
    first: Mapping[str, Any], models: Sequence[Mapping[str, Any]], stage: int
) -> list[Mapping[str, Tensor]]:
    """Return the parts of frozen parameters that the model files have."""
    return [each["frozen_param_fragments"] or {} for each in (models if stage == 3 else [first])]


def _read(folder: Path, shape: tuple[int, ...], group: int, counters: Mapping[str, Any]) -> Foreign:
    """Read a parameter. ``shape`` is that of files without one, ``counters`` what the optimizer counts."""
    contents: dict[str, tuple[torch.dtype, Sequence[Tensor]]] = {}
    scalars = {
        key: [NAMES[value.dtype], value.item()]
        for key, value in counters.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    for path in sorted(folder.glob("*.pt")):
        found = load_torch(path, ALLOWED)
        tensor = found.get("param") if isinstance(found, Mapping) else found
        key = VALUE if path.stem == "fp32" else path.stem
        if isinstance(tensor, (int, float)):
            scalars[key] = ["F32", float(tensor)]
            continue
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: contains no tensor")
        if key == "step" or (key != VALUE and tensor.dim() == 0 and shape):
            scalars[key] = [NAMES[tensor.dtype], tensor.item()]
            continue
        if isinstance(found, Mapping) and key == VALUE:
            shape = tuple(tensor.shape)
        contents[key] = (tensor.dtype, [tensor.detach()])
    numels = {key: sum(piece.numel() for piece in pieces) for key, (_, pieces) in contents.items()}
    if VALUE not in contents:
        raise CheckpointError(f"{folder / 'fp32.pt'}: is missing")
    for key, numel in numels.items():
        if numel != torch.Size(shape).numel():
            name = "fp32" if key == VALUE else key
            raise CheckpointError(
                f"{folder / name}.pt: has {numel} elements, which does not match its shape {list(shape)}"
            )
    return Foreign(dtype=torch.float32, shape=shape, group=group, contents=contents, scalars=scalars)
