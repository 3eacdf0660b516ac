"""Reads what DeepSpeed's engine.save_checkpoint has written (layout of version 0.19; the files are pickled).

Stages 1 and 2: each rank has an equal part of a flat vector for every parameter group, in which the group's
parameters follow one another; the end of the last part is padding. Stage 3: every parameter is cut into equal
parts, one for each rank, the last padded; a rank's parts follow one another over all groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format.manifest import LATEST, VALUE
from ..format.tensor_file import NAMES, CheckpointError
from .common import Foreign, ForeignCheckpoint, load_torch, whole, with_ties

_OURS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("sparse_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "autoep_layers"),
}
"""Keys of the model file that are DeepSpeed's; the others are the caller's client_state."""


class _Inert:
    """Stands for an object of one of DeepSpeed's classes: holds what was pickled, and does nothing."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


ALLOWED = [
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
]
"""DeepSpeed's classes that its files name, for ``torch.serialization.safe_globals``."""


def find_deepspeed(path: Path, tag: str | None) -> Path | None:
    """Return the folder with DeepSpeed's files that ``path`` and ``tag`` mean; None if there is none. Raises
    CheckpointError for a tag that is not there.
    """
    if tag is None and (path / LATEST).is_file():
        tag = (path / LATEST).read_text(encoding="utf-8").strip()
    folder = path / tag if tag is not None else path
    if tag is not None and not folder.is_dir():
        raise CheckpointError(f"{path}: has no checkpoint {tag!r}")
    return folder if any(folder.glob("*_model_states.pt")) else None


def read_deepspeed(folder: Path) -> ForeignCheckpoint:
    """Read the files. Raises CheckpointError for missing parts, model parallelism, experts, state on NVMe."""
    models = by_rank(folder, "_model_states.pt")
    optims = by_rank(folder, "_optim_states.pt")
    for pattern, what in (
        ("layer_*-model_*", "pipeline parallelism"),
        ("*expert*", "experts (MoE)"),
        ("*mp_rank_01_*", "model parallelism"),
    ):
        if any(folder.glob(pattern)):
            raise CheckpointError(f"{folder}: was saved with {what}, which cannot be imported")
    if any(folder.glob("offloaded_tensors")):
        raise CheckpointError(
            f"{folder}: its optimizer state is in NVMe swap files, which cannot be imported: save it with "
            "offload_optimizer.device cpu"
        )
    first = load_torch(models[0], ALLOWED)
    if not optims:
        return _weights_alone(first)
    states = [load_torch(path, ALLOWED)["optimizer_state_dict"] for path in optims]
    stage = int(getattr(states[0].get("zero_stage"), "value", states[0].get("zero_stage") or 0))
    count = states[0].get("partition_count")
    ranks = max(count) if isinstance(count, list) else int(count or len(states))
    # Without a rank's part, its elements would be taken from the parts behind it.
    if ranks != len(states):
        raise CheckpointError(f"{folder}: has {len(states)} of {ranks} *_optim_states.pt files")
    shapes = [dict(group) for group in first["param_shapes"]]
    parameters: dict[str, Foreign] = {}
    if stage == 3:
        others = [first, *(load_torch(path, ALLOWED) for path in models[1:])]
        if len(others) != ranks:
            raise CheckpointError(f"{folder}: has {len(others)} of {ranks} *_model_states.pt files")
        parameters |= _stage3(shapes, states)
        parameters |= frozen_of(first, [other["frozen_param_fragments"] or {} for other in others])
        inner = states[0]["optimizer_state_dict"]
    else:
        parameters |= _stage12(folder, shapes, states)
        parameters |= frozen_of(first, [first["frozen_param_fragments"] or {}])
        inner = states[0]["base_optimizer_state"]
    return assemble(first, stage, parameters, states[0].get("loss_scaler"), inner)


def assemble(
    first: Mapping[str, Any], stage: int, parameters: dict[str, Foreign], scaler: Any, inner: Any
) -> ForeignCheckpoint:
    """Return the checkpoint of a model file, the parameters that are known, a loss scaler and what has the
    optimizer's groups.
    """
    tied = dict(first.get("shared_params") or {})
    parameters |= _others(first, parameters.keys() | tied.keys())
    dtypes = {name: entry.dtype for name, entry in parameters.items()}
    dtypes |= {name: tensor.dtype for name, tensor in first["module"].items() if isinstance(tensor, Tensor)}
    ordered = [name for name in first["module"] if name in parameters]
    ordered += [name for name in parameters if name not in ordered]
    return ForeignCheckpoint(
        parameters={name: replace(parameters[name], dtype=dtypes[name]) for name in ordered},
        buffers=_buffers(first),
        tied=tied,
        facts={
            **_facts(first, stage),
            "loss_scaler": _scaler(scaler),
            "optimizer": {"class": None, "groups": _groups(inner)},
        },
    )


def by_rank(folder: Path, suffix: str) -> list[Path]:
    def key(path: Path) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", path.name))

    return sorted(folder.glob(f"*{suffix}"), key=key)


def _facts(model: Mapping[str, Any], stage: int) -> dict[str, Any]:
    steps = int(model.get("global_steps") or 0)
    schedule = model.get("lr_scheduler")
    return {
        "stage": stage,
        "written_by": {"deepspeed": str(model.get("ds_version"))},
        "engine": {
            "global_steps": steps,
            "micro_steps": 0,
            "global_samples": int(model.get("global_samples") or 0),
            "skipped_steps": int(model.get("skipped_steps") or 0),
        },
        "scheduler": {"class": None, "state": schedule} if isinstance(schedule, Mapping) else None,
        "client_state": {key: value for key, value in model.items() if key not in _OURS},
    }


def _groups(inner: Any) -> list[dict[str, Any]]:
    if not isinstance(inner, Mapping):
        return []
    return [
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "step", "fused", "foreach", "capturable", "differentiable")
        }
        for group in inner.get("param_groups", [])
    ]


def _scaler(scaler: Any) -> dict[str, Any] | None:
    """Convert a DynamicLossScaler's state to our loss scaler's."""
    if not hasattr(scaler, "last_overflow_iter"):
        return None
    return {
        "dynamic": True,
        "scale": float(scaler.cur_scale),
        "left": int(scaler.cur_hysteresis),
        "step": int(scaler.cur_iter),
        "last_overflow": int(scaler.last_overflow_iter),
    }


def _buffers(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}


def _weights_alone(model: Mapping[str, Any]) -> ForeignCheckpoint:
    """Read a checkpoint of stage 0 without the optimizer's state, which names no parameters there."""
    buffers = _buffers(model)
    parameters, found = with_ties({n: value for n, value in model["module"].items() if n not in buffers})
    tied: dict[str, str] = {**(model.get("shared_params") or {}), **found}
    return ForeignCheckpoint(
        parameters={name: entry for name, entry in parameters.items() if name not in tied},
        buffers=buffers,
        tied=tied,
        facts={**_facts(model, 0), "scheduler": None},
    )


def frozen_of(model: Mapping[str, Any], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Foreign]:
    found: dict[str, Foreign] = {}
    for name, shape in (model["frozen_param_shapes"] or {}).items():
        pieces = _between([part[name].reshape(-1) for part in parts], 0, shape.numel())
        dtype = parts[0][name].dtype
        found[name] = Foreign(
            dtype=dtype, shape=tuple(shape), trainable=False, contents={VALUE: (dtype, pieces)}
        )
    return found


def _others(model: Mapping[str, Any], known: Set[str]) -> dict[str, Foreign]:
    """Read the parameters that only the module's state has: stage 1 does not list frozen ones."""
    return {
        name: whole(tensor, trainable=False)
        for name, tensor in model["module"].items()
        if name not in known and name not in model["buffer_names"] and tensor.numel()
    }


def _between(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Return elements ``start`` to ``stop`` of consecutive tensors."""
    found: list[Tensor] = []
    at = 0
    for part in parts:
        low = max(start, at)
        high = min(stop, at + part.numel())
        if low < high:
            found.append(part[low - at : high - at])
        at += part.numel()
    return found


def _kept(
    entry: Mapping[str, Any], numel: int, groups: Sequence[Mapping[str, Any]]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of tensors that the optimizer keeps for each element of a vector, and the rest, with
    the step of an optimizer that counts in its ``groups``.
    """
    # At least as long as the partition: DeepSpeed may pad state, and the caller cuts it off.
    tensors = [
        k for k, v in entry.items() if isinstance(v, Tensor) and v.dim() == 1 and v.numel() >= numel > 1
    ]
    scalars: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.numel() == 1 and key not in tensors:
            scalars[key] = [NAMES[value.dtype], value.item()]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            # torch's optimizers count in tensors now; DeepSpeed's optimizers count in plain numbers
            scalars[key] = ["F32", float(value)] if key == "step" else ["", value]
    steps = [group["step"] for group in groups if "step" in group]
    if tensors and steps and "step" not in scalars:
        scalars["step"] = ["F32", float(steps[0])]
    return tensors, scalars


def _stage12(
    folder: Path, shapes: Sequence[Mapping[str, torch.Size]], states: Sequence[Mapping[str, Any]]
) -> dict[str, Foreign]:
    if not isinstance(states[0]["base_optimizer_state"], Mapping):
        raise CheckpointError(f"{folder}: was saved with elastic_checkpoint, which cannot be imported")
    paddings = states[0].get("param_alignment_paddings") or []
    if any(padding for group in paddings for padding in group):
        raise CheckpointError(
            f"{folder}: was saved with Muon's padding of single parameters, which cannot be imported"
        )
    found: dict[str, Foreign] = {}
    for group, members in enumerate(shapes):
        values = [state["single_partition_of_fp32_groups"][group].reshape(-1) for state in states]
        kept = [state["base_optimizer_state"]["state"].get(group, {}) for state in states]
        groups = states[0]["base_optimizer_state"].get("param_groups", [])
        tensors, scalars = _kept(kept[0], values[0].numel(), groups)
        lists = {VALUE: values}
        for key in tensors:
            lists[key] = [entry[key][: v.numel()] for entry, v in zip(kept, values, strict=True)]
        at = 0
        for name, shape in members.items():
            stop = at + shape.numel()
            contents = {key: (parts[0].dtype, _between(parts, at, stop)) for key, parts in lists.items()}
            found[name] = Foreign(
                dtype=torch.float32, shape=tuple(shape), group=group, contents=contents, scalars=scalars
            )
            at = stop
        if sum(value.numel() for value in values) < at:
            raise CheckpointError(f"{folder}: group {group} has fewer elements than its parameters")
    return found


def _stage3(
    shapes: Sequence[Mapping[str, torch.Size]], states: Sequence[Mapping[str, Any]]
) -> dict[str, Foreign]:
    ranks = len(states)
    found: dict[str, Foreign] = {}
    flats = [[flat.reshape(-1) for flat in state["fp32_flat_groups"]] for state in states]
    kept = [state["optimizer_state_dict"]["state"] for state in states]
    groups = states[0]["optimizer_state_dict"].get("param_groups", [])
    tensors, scalars = _kept(kept[0].get(0, {}), flats[0][0].numel(), groups)
    lists: dict[str, list[list[Tensor]]] = {VALUE: flats}
    for key in tensors:
        lists[key] = [
            [entry[index][key][: flat.numel()] for index, flat in enumerate(own)]
            for entry, own in zip(kept, flats, strict=True)
        ]
    at = 0
    for group, members in enumerate(shapes):
        for name, shape in members.items():
            part = -(-shape.numel() // ranks)
            contents: dict[str, tuple[torch.dtype, list[Tensor]]] = {}
            for key, by_rank in lists.items():
                # Rank by rank, each one's part of the parameter; the last part ends with padding, which is
                # cut off below.
                pieces = [piece for own in by_rank for piece in _between(own, at, at + part)]
                contents[key] = by_rank[0][0].dtype, _between(pieces, 0, shape.numel())
            found[name] = Foreign(
                dtype=torch.float32, shape=tuple(shape), group=group, contents=contents, scalars=scalars
            )
            at += part
    return found
