"""Loads a checkpoint's values and optimizer state into an engine's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..log import warn
from ..optim.sharded_optimizer import ShardStep
from ..zero.hooks import ShardedModel
from ..zero.reduce import GradientReducer
from ..zero.unit import UnitState
from .all_or_none import agree
from .format.jsonable import decode
from .format.manifest import WHOLE, Checkpoint
from .format.tensor_file import CheckpointError
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

if TYPE_CHECKING:
    from ..offload.manager import Offload


class ShardLoader:
    """Loads into one engine while no save is under way, and knows whether a load has ended half-way."""

    def __init__(
        self,
        sharded: ShardedModel,
        reducer: GradientReducer,
        shard_step: ShardStep | None,
        offload: Offload | None,
    ) -> None:
        self._sharded, self._reducer, self._shard_step = sharded, reducer, shard_step
        self._comm, self._offload = sharded.comm, offload
        self._half_loaded = ""

    def check(self) -> None:
        """Raises CheckpointError if a load has ended half-way: there are values of two states then."""
        if self._half_loaded:
            raise CheckpointError(
                f"the last load_checkpoint failed half-way ({self._half_loaded}): load another one first"
            )

    def load(self, checkpoint: Checkpoint, *, strict: bool, with_states: bool) -> None:
        """Takes over the values and, ``with_states``, the optimizer's state. Collective. Raises
        CheckpointError, the same on every rank.
        """
        comm, units = self._comm, self._sharded.units
        step = self._shard_step if with_states else None

        def check() -> None:
            check_model(checkpoint, self._sharded, strict=strict)
            if step is not None:
                check_optimizer(checkpoint, step.optimizer, units)

        agree(comm.exchange, comm.rank, check)
        if checkpoint.manifest["optimizer"] is None:
            step = None
        if step is not None:
            self._warn_of_frozen(checkpoint)
        self._come_to_rest()
        self._half_loaded = "another rank ended"
        try:
            agree(
                comm.exchange,
                comm.rank,
                lambda: with_advice(checkpoint.folder, lambda: self._read(checkpoint, step)),
            )
        except CheckpointError as error:
            self._half_loaded = str(error)
            raise
        stay = [unit for unit in units if unit.trainable and not unit.shard_params]
        for unit in stay:
            unit.start_refresh(written=True)
        comm.settle()
        for unit in stay:
            unit.ensure_full()
        for unit in units:
            unit.changed()
        self._half_loaded = ""

    def _warn_of_frozen(self, checkpoint: Checkpoint) -> None:
        """Names the parameters whose optimizer state is not taken, because they are frozen now."""
        frozen = [name for unit in self._sharded.units if not unit.trainable for name in unit.names]
        saved = [
            name
            for name in frozen
            if checkpoint.parameters.get(source_name(checkpoint, name), {}).get("state", {}).get("tensors")
        ]
        if saved and self._comm.rank == 0:
            names = ", ".join(saved[:3]) + (" ..." if len(saved) > 3 else "")
            warn(
                f"{checkpoint.folder} has optimizer state of {len(saved)} parameters that "
                f"are frozen now ({names}); it is not loaded: unfreeze them before load_checkpoint"
            )

    def _come_to_rest(self) -> None:
        """Returns when no step, gather or gradient is under way."""
        if self._shard_step is not None:
            self._shard_step.wait()
        for unit in self._sharded.units:
            if not unit.shard_params:
                unit.ensure_full()
        self._sharded.free_all()
        assert all(u.state is UnitState.FULL or u.shard_params for u in self._sharded.units)
        self._reducer.clear()
        self._comm.settle()
        self._comm.barrier()

    def _read(self, checkpoint: Checkpoint, step: ShardStep | None) -> None:
        if step is None:
            load_units(checkpoint, self._sharded.units, self._offload)
        else:
            step.take_hyperparameters()
            runs = step.split(described(checkpoint))
            load_units(checkpoint, self._sharded.units, self._offload, step.optimizer, runs)
            groups = checkpoint.manifest["optimizer"]["groups"]
            restore_groups(step.optimizer, decoded(checkpoint, WHOLE, groups))
            step.show_hyperparameters()
        load_persistent(checkpoint, self._sharded)


def decoded(checkpoint: Checkpoint, file: str, value: Any) -> Any:
    """Decodes an entry of the manifest with its tensors, which are in ``file``. Raises CheckpointError."""
    return decode(value, lambda name: checkpoint.file(file).read_whole(name))
