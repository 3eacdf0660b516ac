"""Reads a checkpoint into any engine: every rank reads the ranges that its shards need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cut import cut_of, whole_shape
from ..optim.slices import ShardSlice
from ..zero.hooks import ShardedModel
from ..zero.unit import Unit
from .format.manifest import VALUE, WHOLE, Checkpoint
from .format.tensor_file import CheckpointError
from .shard_io import Described, Description, Fill, persistent, take_state, take_values

_SHOWN = 5
_ALIKE = ({"Adam", "AdamW"},)
"""Groups of optimizers whose state is alike."""


def check_model(checkpoint: Checkpoint, sharded: ShardedModel, *, strict: bool) -> None:
    """Raise CheckpointError, naming parameters, if checkpoint and model do not fit: in shape always, in names
    where ``strict``.
    """
    shapes = {
        name: list(whole_shape(parameter, shape))
        for unit in sharded.units
        for name, parameter, shape in zip(unit.names, unit.parameters, unit.shapes, strict=True)
    }
    sources = {name: source_name(checkpoint, name) for name in shapes}
    there = {name: entry["shape"] for name, entry in checkpoint.parameters.items()}
    buffers = {name: entry["shape"] for name, entry in checkpoint.manifest["buffers"].items()}
    for name, tensor in persistent(sharded).items():
        if name in there and name not in shapes:  # an imported file does not tell them apart
            buffers[name] = there.pop(name)
        shapes[f"buffer {name}"] = list(tensor.shape)
        sources[f"buffer {name}"] = f"buffer {name}"
    there |= {f"buffer {name}": shape for name, shape in buffers.items()}
    problems = [
        f"{name} has shape {there[sources[name]]} in the checkpoint and {shape} in the model"
        for name, shape in shapes.items()
        if there.get(sources[name], shape) != shape
    ]
    fits = not problems
    if strict:
        excluded, used = set(checkpoint.manifest["excluded"]), set(sources.values())
        missing = [name for name, source in sources.items() if source not in there and name not in excluded]
        problems += [f"{name} is not in the checkpoint" for name in missing]
        fits = fits and 2 * len(missing) <= len(sources)
        problems += [f"{name} is not in the model" for name in there if name not in used]
    if problems:
        advice = " (load_module_strict=False loads the parameters that match)" if strict and fits else ""
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        found = "; ".join(problems[:_SHOWN])
        raise CheckpointError(f"{checkpoint.folder}: does not match the model: {found}{more}{advice}")


def check_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """Raise CheckpointError if its state is another optimizer's, or of groups in another order."""
    saved = checkpoint.manifest["optimizer"]
    if saved is None:
        return
    kinds = {saved["class"], type(optimizer).__name__}
    advice = "pass load_optimizer_states=False to start with fresh state"
    if saved["class"] is not None and len(kinds) > 1 and not any(kinds <= alike for alike in _ALIKE):
        raise CheckpointError(
            f"{checkpoint.folder}: has the state of {saved['class']}, but the optimizer is "
            f"{type(optimizer).__name__}: {advice}"
        )
    count = len(saved["groups"])
    if count and count != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint.folder}: has {count} parameter groups, but the optimizer has "
            f"{len(optimizer.param_groups)}: {advice}"
        )
    for own, group in zip(optimizer.param_groups, saved["groups"], strict=False):
        for key, default in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            before, now = bool(group.get(key, default)), bool(own.get(key, default))
            if before is not now:
                raise CheckpointError(
                    f"{checkpoint.folder}: was saved with {key} {before}, but the optimizer has {now}: "
                    f"{advice}"
                )
    for unit in units if count > 1 else ():
        for name, slot in zip(unit.names, unit.layout.slots, strict=True):
            entry = checkpoint.parameters.get(source_name(checkpoint, name))
            if entry is not None and entry["trainable"] and slot.group not in (-1, entry["group"]):
                raise CheckpointError(
                    f"{checkpoint.folder}: has {name} in parameter group {entry['group']}, but the optimizer "
                    f"has it in group {slot.group}: {advice}"
                )


def source_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the checkpoint's name of a parameter; tied ones may have had another first name."""
    return name if name in checkpoint.parameters else checkpoint.tied.get(name, name)


def filler(checkpoint: Checkpoint, unit: Unit) -> Fill:
    """Return a function that reads elements of a unit. What the checkpoint does not have is left as it is."""

    def fill(target: Tensor, first: int, kind: str) -> None:
        for index, low, high in unit.layout.overlaps(first, first + target.numel()):
            name = source_name(checkpoint, unit.names[index])
            entry = checkpoint.parameters.get(name)
            if entry is None or (kind != VALUE and kind not in entry["state"]["tensors"]):
                continue
            start = low - unit.layout.slots[index].offset
            cut = cut_of(unit.parameters[index])
            box = None if cut is None else cut.box
            checkpoint.read_into(target[low - first : high - first], name, kind, start, box)

    return fill


def described(checkpoint: Checkpoint) -> Callable[[Unit, int], Description | None]:
    """Return a function that describes a parameter's state; it gives None if the checkpoint lacks it."""
    known: dict[str, Description] = {}

    def label(unit: Unit, index: int) -> Description | None:
        name = source_name(checkpoint, unit.names[index])
        if name not in checkpoint.parameters:
            return None
        if name not in known:
            known[name] = Description.from_json(checkpoint.parameters[name]["state"])
        return known[name]

    return label


def load_units(
    checkpoint: Checkpoint,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer | None = None,
    slices: Sequence[tuple[ShardSlice, Description | None]] = (),
) -> None:
    """Load this rank's values and, with an ``optimizer``, the state of its ``slices``, unit by unit as they
    lie in the files. Raises CheckpointError, DiskError.
    """
    by_unit: dict[int, list[Described]] = {}
    for part, what in slices:
        if what is not None:
            by_unit.setdefault(id(part.unit), []).append((part, what))
    with torch.no_grad():
        for unit in units:
            fill = filler(checkpoint, unit)
            take_values(unit, fill)
            own = by_unit.get(id(unit), [])
            if optimizer is not None and own:
                take_state(unit, own, fill, optimizer)


def load_persistent(checkpoint: Checkpoint, sharded: ShardedModel) -> None:
    """Load buffers, and parameters of integers. Raises CheckpointError."""
    with torch.no_grad():
        for name, target in persistent(sharded).items():
            if name in checkpoint.manifest["buffers"]:
                target.copy_(checkpoint.file(WHOLE).read_whole(f"buffer.{name}"))
            elif name in checkpoint.parameters:
                flat = torch.empty(target.numel(), dtype=target.dtype)
                checkpoint.read_into(flat, name)
                target.copy_(flat.view(target.shape))


_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable", "state_dtype")
"""Entries of a param group that do not change what is computed, but for rounding: each run keeps its own."""


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group."""
    return [
        {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
        for group in optimizer.param_groups
    ]


_OF_THE_RUN = ("decoupled_weight_decay", "local_step_clipper")
"""Entries that are saved, but belong to a run's class (Adam or AdamW) or stage."""


OF_SCHEDULES = (
    *("lr", "initial_lr", "max_lr", "min_lr", "swa_lr"),
    *("base_momentum", "max_momentum"),
)
"""Entries that schedules write at their start, and compute later rates from."""


def restore_groups(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], keep: Sequence[str] = ()
) -> None:
    """Restore the hyper-parameters that :func:`groups_of` has returned, except entries to ``keep``."""
    for group, entries in zip(optimizer.param_groups, saved, strict=False):
        for key, value in entries.items():
            if key in _OF_THE_RUN or key in keep:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
