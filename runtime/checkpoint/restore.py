"""Loads a checkpoint's values and optimizer state into an engine's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..log import warn
from ..mesh.choice import forget_errors
from ..optim.sharded_optimizer import ShardedOptimizer
from ..zero.hooks import ShardedModel
from ..zero.ownership import UnitState
from .all_or_none import all_or_none
from .format.jsonable import decode
from .format.manifest import WHOLE, Checkpoint
from .load import (
    check_model,
    check_optimizer,
    described,
    load_persistent,
    load_units,
    restore_groups,
    source_name,
)
from .selection import with_advice


def check_fits(
    checkpoint: Checkpoint, sharded: ShardedModel, step: ShardedOptimizer | None, *, strict: bool
) -> None:
    """Raise CheckpointError, on every rank, if a checkpoint is not of this model and optimizer; warn of
    optimizer state that is not taken, because its parameters are frozen now. Collective.
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


def come_to_rest(sharded: ShardedModel, step: ShardedOptimizer | None) -> None:
    """Return when no step, gather or gradient is under way. Collective."""
    if step is not None:
        step.wait()
    for unit in sharded.units:
        if not unit.shard_params:
            unit.wait_unsharded()
    sharded.reshard_all()
    assert all(unit.state is UnitState.UNSHARDED or unit.shard_params for unit in sharded.units)
    sharded.reducer.clear()
    sharded.comm.drain()
    sharded.comm.barrier()


def restore_shards(
    checkpoint: Checkpoint,
    sharded: ShardedModel,
    step: ShardedOptimizer | None,
    *,
    keep: Sequence[str] = (),
) -> None:
    """Load the values and, with a ``step``, the optimizer's state, without the entries of parameter groups to
    ``keep``. Collective. Raises CheckpointError on every rank; then some values are new and some are old.
    """
    comm, units = sharded.comm, sharded.units

    def read() -> None:
        saved = checkpoint.manifest["optimizer"]
        if step is None or saved is None:
            load_units(checkpoint, units)
        else:
            step.take_hyperparameters()
            slices = step.split(described(checkpoint))
            load_units(checkpoint, units, step.optimizer, slices)
            restore_groups(step.optimizer, decoded(checkpoint, WHOLE, saved["groups"]), keep)
            step.show_hyperparameters()
        load_persistent(checkpoint, sharded)

    all_or_none(comm.exchange, comm.rank, lambda: with_advice(checkpoint.folder, read))
    stay = [unit for unit in units if unit.trainable and not unit.shard_params]
    for unit in stay:
        unit.refresh()
    comm.drain()
    for unit in stay:
        unit.wait_unsharded()
    for unit in units:
        unit.changed()
    forget_errors(comm.link)


def decoded(checkpoint: Checkpoint, file: str, value: Any) -> Any:
    """Decode an entry of the manifest with its tensors, which are in ``file``. Raises CheckpointError."""
    return decode(value, lambda name: checkpoint.file(file).read_whole(name))
