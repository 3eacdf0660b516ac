"""Reads a checkpoint into any engine: every rank reads the ranges that its shards need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.nodes import forget_errors
from ..comm.shard_spec import full_shape, spec_of
from ..errors import RankMismatchError
from ..log import warn
from ..optim.registry import parameter_states
from ..optim.slices import ShardSlice
from ..optim.step import ShardedOptimizer
from ..optimizer_specs import can_read, foreign_states
from ..zero.hooks import ShardedModel
from ..zero.placeholder import UnitState
from ..zero.unit import Unit
from .agree import all_or_none
from .format.commit import check_tag, new_owner
from .format.jsonable import decode
from .format.manifest import VALUE, WHOLE, Checkpoint, advice, candidates, find, verified
from .format.tensor_file import CheckpointError
from .shard_io import Described, Description, Fill, persistent, take_state, take_values

# -- load -------------------------------------------------------------------------------------------


_SHOWN = 5


def check_model(checkpoint: Checkpoint, sharded: ShardedModel, *, strict: bool) -> None:
    """Raise CheckpointError, naming parameters, if checkpoint and model do not fit: in shape always, in names
    where ``strict``.
    """
    shapes = {
        name: list(full_shape(parameter, shape))
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
        excluded = set(checkpoint.manifest["excluded"])
        used = set(sources.values())
        missing = [name for name, source in sources.items() if source not in there and name not in excluded]
        problems += [f"{name} is not in the checkpoint" for name in missing]
        # With most names missing it is another model: loading what matches would load almost nothing, and
        # look like a success.
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
    advice = "pass load_optimizer_states=False to start with fresh state"
    if saved["class"] is not None and not can_read(type(optimizer).__name__, saved["class"]):
        raise CheckpointError(
            f"{checkpoint.folder}: has the state of {saved['class']}, but the optimizer is "
            f"{type(optimizer).__name__}: {advice}"
        )
    _check_states(checkpoint, optimizer, advice)
    count = len(saved["groups"])
    if count and count != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint.folder}: has {count} parameter groups, but the optimizer has "
            f"{len(optimizer.param_groups)}: {advice}"
        )
    for own, group in zip(optimizer.param_groups, saved["groups"], strict=False):
        for key, default in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            before = bool(group.get(key, default))
            now = bool(own.get(key, default))
            if before is not now:
                raise CheckpointError(
                    f"{checkpoint.folder}: was saved with {key} {before}, but the optimizer has {now}: "
                    f"{advice}"
                )
    if count <= 1:
        return
    for unit in units:
        for name, slot in zip(unit.names, unit.layout.slots, strict=True):
            entry = checkpoint.parameters.get(source_name(checkpoint, name))
            # Groups may have equal numbers and other members: then a parameter would get the rate and the
            # decay of another group.
            if entry is not None and entry["trainable"] and slot.group not in (-1, entry["group"]):
                raise CheckpointError(
                    f"{checkpoint.folder}: has {name} in parameter group {entry['group']}, but the optimizer "
                    f"has it in group {slot.group}: {advice}"
                )


def _check_states(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, advice: str) -> None:
    """Raise CheckpointError for the state of another package's class of the same name."""
    own = parameter_states(optimizer)
    foreign = foreign_states(own) if own else set()
    for name, described in checkpoint.parameters.items():
        kept = {*described["state"]["tensors"], *described["state"]["scalars"]}
        if other := sorted(kept & foreign):
            kind = type(optimizer)
            raise CheckpointError(
                f"{checkpoint.folder}: has {other[0]} of {name}, which is not the state of "
                f"{kind.__module__}.{kind.__name__}, but of another package's {kind.__name__}: {advice}"
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
            spec = spec_of(unit.parameters[index])
            # The file may have the parameter whole, or cut in another way: elements are asked for by the
            # part's box in the whole.
            box = None if spec is None else spec.box
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
    *,
    rounded: bool = False,
) -> None:
    """Load this rank's values and, with an ``optimizer``, the state of its ``slices``, unit by unit as they
    lie in the files. Raises CheckpointError, DiskError. ``rounded``: see :func:`take_values`.
    """
    # Values and state of a unit lie together in a file, so that each chunk of it is read once.
    by_unit: dict[int, list[Described]] = {}
    for part, what in slices:
        if what is not None:
            by_unit.setdefault(id(part.unit), []).append((part, what))
    with torch.no_grad():
        for unit in units:
            fill = filler(checkpoint, unit)
            take_values(unit, fill, rounded=rounded)
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
                # In place: a learning rate that is a tensor is one that kernels on the device read.
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# -- selection --------------------------------------------------------------------------------------
#
# Chooses, equally on all ranks, the folder and tag of a save and the checkpoint of a load.


T = TypeVar("T")


@dataclass(frozen=True)
class ChosenTarget:
    """Says where a save goes, equally on all ranks."""

    folder: Path
    owner: str
    """Identifies the save in the name of its temporary folder."""
    tag: str


def choose_target(comm: Comm, folder: Path, tag: str, *, node_local: bool, validation: str) -> ChosenTarget:
    """Choose rank 0's folder, owner and tag on all ranks; each keeps its own folder if it is ``node_local``.

    Of tags that differ, the ``validation`` "Warn" and "Ignore" take rank 0's; "Fail" is an error. Raises
    CheckpointError on every rank.
    """
    # The temporary folder of a save has rank 0's name: equal on all ranks, and no other save's.
    places = comm.exchange((str(folder), tag, new_owner()))
    first = str(places[0][0])
    others = [rank for rank, (other, _, _) in enumerate(places) if other != first]
    if others and not node_local:
        # A script that makes up a name on each rank, as DeepSpeed's HelloDeepSpeed does, has trained by now.
        folder = Path(first)
        if comm.rank == 0:
            rank = others[0]
            warn(
                f"save_checkpoint: rank {rank} saves to {places[rank][0]}, but rank 0 to {first}: all save "
                "to rank 0's folder, which they have to share. Pass the same folder on every rank, or set "
                '"use_node_local_storage"'
            )
    _check_tags([str(given) for _, given, _ in places], validation, is_first=comm.rank == 0)
    tag = places[0][1]
    check_tag(tag)
    return ChosenTarget(folder, str(places[0][2]), tag)


def _check_tags(tags: Sequence[str], validation: str, *, is_first: bool) -> None:
    others = [rank for rank, tag in enumerate(tags) if tag != tags[0]]
    if not others or validation == "Ignore":
        return
    said = ", ".join(f"rank {rank} passes tag {tags[rank]!r}" for rank in [0, *others[:3]])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    text = f"save_checkpoint: {said}{more}: pass the same tag on every rank"
    if validation == "Fail":
        raise CheckpointError(f'{text} (checkpoint.tag_validation is "Fail")')
    if is_first:
        warn(f"{text}; saving under rank 0's tag {tags[0]!r}")


def open_chosen(
    comm: Comm, folder: Path, tag: str | None, *, node_local: bool, missing_ok: bool
) -> Checkpoint | None:
    """Open one checkpoint on every rank: the named one, for "auto" the newest whole one, for None what
    ``latest`` names. Returns None if there is none. Collective. Raises RankMismatchError, and CheckpointError
    also for a folder that does not exist, unless ``missing_ok``.
    """
    tags = comm.exchange(tag)
    if any(other != tags[0] for other in tags):
        rank = next(rank for rank, other in enumerate(tags) if other != tags[0])
        raise RankMismatchError(
            f"load_checkpoint: rank {rank} passes tag {tags[rank]!r}, but rank 0 {tags[0]!r}: pass the same "
            "tag on every rank"
        )
    leads = comm.rank == 0
    is_there = all_or_none(
        comm.exchange, comm.rank, lambda: not leads or _check_exists(folder, missing_ok=missing_ok)
    )[0]
    if not is_there:
        return None
    if tag == "auto":
        found = _newest_whole(comm, folder, node_local=node_local)
    else:
        # Rank 0 alone reads `latest`. Ranks that look at different times, or through a file system's cache,
        # could find different checkpoints.
        found = all_or_none(comm.exchange, comm.rank, lambda: find(folder, tag) if leads else None)[0]
    if found is None:
        return None
    # By its name: with node-local storage, each rank has the folder that it has passed.
    path = folder if found == folder else folder / found.name
    opened: Checkpoint = all_or_none(
        comm.exchange, comm.rank, lambda: with_advice(path, lambda: Checkpoint(path)), own=True
    )
    # The tag may have been saved again between two ranks' opens, and nodes with separate folders may have
    # different saves of it.
    saves = comm.exchange(opened.manifest.get("save_id"))
    if any(save != saves[0] for save in saves):
        other = next(rank for rank, save in enumerate(saves) if save != saves[0])
        raise CheckpointError(
            f"{path}: rank {other} and rank 0 have files of different saves under this tag: load another "
            'tag, or tag="auto"'
        )
    return opened


def _check_exists(folder: Path, *, missing_ok: bool) -> bool:
    """Tell whether the folder exists. Raises CheckpointError if it does not, unless ``missing_ok``."""
    if not folder.exists() and not missing_ok:
        raise CheckpointError(
            f"{folder}: no such folder: correct the path. To start without a checkpoint, use "
            "load_checkpoint(zlaunch.resume_dir(folder)) or missing_ok=True"
        )
    if folder.is_file():
        raise CheckpointError(
            f"{folder}: is a file, expected the folder passed to save_checkpoint: pass that folder, and the "
            "name of a checkpoint in it as tag"
        )
    return folder.exists()


def _newest_whole(comm: Comm, folder: Path, *, node_local: bool) -> Path | None:
    """Find the newest checkpoint that is whole wherever it is. Collective."""
    names = all_or_none(comm.exchange, comm.rank, lambda: [path.name for path in candidates(folder)])[0]
    first = ""
    for name in names:

        def verify(path: Path = folder / name) -> object:
            # In a shared folder, one rank reads every byte for all.
            if comm.rank and not node_local:
                return None
            return verified(path)[0].get("save_id")

        try:
            saves = all_or_none(comm.exchange, comm.rank, verify)
        except CheckpointError as error:
            first = first or str(error)
            if comm.rank == 0:
                warn(str(error))
            continue
        if not node_local or all(save == saves[0] for save in saves):
            return folder / str(name)
    if names:
        raise CheckpointError(f"{folder}: none of its {len(names)} checkpoints is complete: {first}")
    return None


def with_advice(path: Path, action: Callable[[], T]) -> T:
    """Call ``action``; add to its CheckpointError what could be loaded instead of the one at ``path``."""
    try:
        return action()
    except CheckpointError as error:
        raise CheckpointError(f"{error}{advice(path.parent, but=path.name)}") from None


# -- restore ----------------------------------------------------------------------------------------
#
# Loads a checkpoint's values and optimizer state into an engine's shards.


def check_fits(
    checkpoint: Checkpoint, sharded: ShardedModel, step: ShardedOptimizer | None, *, strict: bool
) -> None:
    """Raise CheckpointError, on every rank, if a checkpoint is not of this model and optimizer; warn of
    optimizer state that is not taken, because its parameters are frozen now, and of state that is missing,
    because they were. Collective.
    """

    def check() -> None:
        check_model(checkpoint, sharded, strict=strict)
        if step is not None:
            check_optimizer(checkpoint, step.optimizer, sharded.units)

    all_or_none(sharded.comm.exchange, sharded.comm.rank, check)
    saved_by = (checkpoint.manifest["optimizer"] or {}).get("class")
    if step is not None and sharded.comm.rank == 0 and saved_by not in (None, type(step.optimizer).__name__):
        warn(
            f"{checkpoint.folder} was saved with {saved_by}: {type(step.optimizer).__name__} continues with "
            "its moments, but applies weight decay differently"
        )
    if step is None or checkpoint.manifest["optimizer"] is None or sharded.comm.rank != 0:
        return
    saved = [
        name
        for unit in sharded.units
        for name in unit.names
        if not unit.trainable
        and checkpoint.parameters.get(source_name(checkpoint, name), {}).get("state", {}).get("tensors")
    ]
    if saved:
        names = ", ".join(saved[:3]) + (" ..." if len(saved) > 3 else "")
        warn(
            f"{checkpoint.folder}: optimizer state of {len(saved)} frozen parameters is not loaded "
            f"({names}): unfreeze them before load_checkpoint"
        )
    thawed = [
        name
        for unit in sharded.units
        for name in unit.names
        if unit.trainable
        and checkpoint.parameters.get(source_name(checkpoint, name), {}).get("trainable") is False
    ]
    if thawed:
        names = ", ".join(thawed[:3]) + (" ..." if len(thawed) > 3 else "")
        warn(
            f"{checkpoint.folder} has no optimizer state of {len(thawed)} parameters that were frozen and "
            f"train now ({names}): theirs starts from zero"
        )


def quiesce(sharded: ShardedModel, step: ShardedOptimizer | None) -> None:
    """Return when no step, gather or gradient is under way. Collective."""
    if step is not None:
        step.wait()
    for unit in sharded.units:
        if not unit.shard_params:
            unit.wait_unsharded()
    sharded.reshard_all()
    assert all(unit.state is UnitState.UNSHARDED or unit.shard_params for unit in sharded.units)
    # Gradients of micro-batches before the load are of the old values.
    sharded.reducer.clear()
    sharded.comm.drain()
    sharded.comm.barrier()


def restore_shards(
    checkpoint: Checkpoint,
    sharded: ShardedModel,
    step: ShardedOptimizer | None,
    *,
    keep: Sequence[str] = (),
    rounded: bool = False,
) -> None:
    """Load the values and, with a ``step``, the optimizer's state, without the entries of parameter groups to
    ``keep``. ``rounded``: round the masters to the data type of training. Collective. Raises CheckpointError
    on every rank; then some values are new and some are old.
    """
    comm = sharded.comm
    units = sharded.units

    def read() -> None:
        saved = checkpoint.manifest["optimizer"]
        if step is None or saved is None:
            load_units(checkpoint, units, rounded=rounded)
        else:
            step.take_hyperparameters()
            slices = step.split(described(checkpoint))
            load_units(checkpoint, units, step.optimizer, slices, rounded=rounded)
            restore_groups(step.optimizer, decoded(checkpoint, WHOLE, saved["groups"]), keep)
            step.show_hyperparameters()
        load_persistent(checkpoint, sharded)

    all_or_none(comm.exchange, comm.rank, lambda: with_advice(checkpoint.folder, read))
    # Gathers, so only after all_or_none(): see Note [All or none] in agree.py.
    stay = [unit for unit in units if unit.trainable and not unit.shard_params]
    for unit in stay:
        unit.refresh()
    comm.drain()
    for unit in stay:
        unit.wait_unsharded()
    for unit in units:
        unit.changed()
    # Errors of quantised gradients were made with the old values.
    forget_errors(comm.link)


def decoded(checkpoint: Checkpoint, file: str, value: Any) -> Any:
    """Decode an entry of the manifest with its tensors, which are in ``file``. Raises CheckpointError."""
    return decode(value, lambda name: checkpoint.file(file).read_whole(name))
