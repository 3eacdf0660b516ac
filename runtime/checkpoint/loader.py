"""An engine's loads: which checkpoint is meant, whether it fits, and taking it over."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DiskError, RankMismatchError
from ..log import warn
from ..optim.sharded_optimizer import ShardedOptimizer
from ..zero.hooks import ShardedModel
from ..zero.ownership import UnitState
from ..zero.reduce import GradientReducer
from .all_or_none import agree
from .format.commit import absolute
from .format.jsonable import decode
from .format.manifest import WHOLE, Checkpoint, advice, candidates, find, verified
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
from .save import rank_file


class Loader:
    """Loads into one engine. No save may be under way."""

    def __init__(
        self,
        sharded: ShardedModel,
        shard_step: ShardedOptimizer | None,
        reducer: GradientReducer,
        *,
        node_local: bool,
    ) -> None:
        self._sharded, self._shard_step, self._reducer = sharded, shard_step, reducer
        self._comm, self._node_local = sharded.comm, node_local
        self._half_loaded = ""

    def check(self) -> None:
        """Raises CheckpointError if a load has ended half-way: there are values of two states then."""
        if self._half_loaded:
            raise CheckpointError(
                f"the last load_checkpoint failed half-way ({self._half_loaded}): load another one first"
            )

    def open(self, folder: str | os.PathLike[str], tag: str | None) -> Checkpoint | None:
        """The checkpoint that is meant, on every rank the same; None if there is none. Collective. Raises
        CheckpointError, RankMismatchError.
        """
        comm = self._comm
        folder = absolute(folder)
        tags = comm.exchange(tag)
        if any(other != tags[0] for other in tags):
            rank = next(rank for rank, other in enumerate(tags) if other != tags[0])
            raise RankMismatchError(
                f"load_checkpoint(tag=...): rank {rank} asks for {tags[rank]!r} and rank 0 for "
                f"{tags[0]!r}; all ranks must load the same checkpoint"
            )
        if tag == "auto":
            found = self._newest_whole(folder)
        else:
            found = agree(comm.exchange, comm.rank, lambda: find(folder, tag) if comm.rank == 0 else None)[0]
        if found is None:
            return None
        path = folder if found == folder else folder / found.name
        opened: Checkpoint = agree(
            comm.exchange,
            comm.rank,
            lambda: self._advised(folder, path.name, lambda: Checkpoint(path)),
            own=True,
        )
        saves = comm.exchange(opened.manifest.get("save_id"))
        if any(save != saves[0] for save in saves):
            other = next(rank for rank, save in enumerate(saves) if save != saves[0])
            raise CheckpointError(
                f"{path}: rank {other} sees another save of this tag than rank 0 does: the nodes' "
                'folders do not belong together; load another tag, or tag="auto"'
            )
        return opened

    def _newest_whole(self, folder: Path) -> Path | None:
        """The newest checkpoint that is whole wherever it is; None if there is none at all. Collective."""
        comm = self._comm
        names = agree(comm.exchange, comm.rank, lambda: [path.name for path in candidates(folder)])[0]
        first = ""
        for name in names:

            def verify(path: Path = folder / name) -> object:
                if comm.rank and not self._node_local:
                    return None
                return verified(path)[0].get("save_id")

            try:
                saves = agree(comm.exchange, comm.rank, verify)
            except CheckpointError as error:
                first = first or str(error)
                if comm.rank == 0:
                    warn(str(error))
                continue
            if not self._node_local or all(save == saves[0] for save in saves):
                return folder / str(name)
        if names:
            raise CheckpointError(f"{folder}: none of its {len(names)} checkpoints is whole: {first}")
        return None

    @staticmethod
    def _advised(folder: Path, tag: str, action: Callable[[], Any]) -> Any:
        """Damage is told with what could be loaded instead."""
        try:
            return action()
        except CheckpointError as error:
            raise CheckpointError(f"{error}{advice(folder, but=tag)}") from None

    def load(self, checkpoint: Checkpoint, *, strict: bool, with_states: bool) -> None:
        """Take over its values and, ``with_states``, the optimizer's. Collective. Raises CheckpointError, the
        same on every rank.
        """
        comm, step = self._comm, self._shard_step
        optimizer = step.optimizer if step is not None and with_states else None
        states = optimizer is not None and checkpoint.manifest["optimizer"] is not None

        def check() -> None:
            check_model(checkpoint, self._sharded, strict=strict)
            if optimizer is not None:
                check_optimizer(checkpoint, optimizer, self._sharded.units)

        agree(comm.exchange, comm.rank, check)
        if states:
            self._say_unused(checkpoint)
        self._rest()
        self._half_loaded = "another rank ended"
        try:
            folder, tag = checkpoint.folder.parent, checkpoint.folder.name
            read = partial(self._read, checkpoint, states)
            agree(comm.exchange, comm.rank, lambda: self._advised(folder, tag, read))
        except CheckpointError as error:
            self._half_loaded = str(error)
            raise
        stay = [unit for unit in self._sharded.units if unit.trainable and not unit.shard_params]
        for unit in stay:
            unit.refresh()
        comm.settle()
        for unit in stay:
            unit.wait_unsharded()
        for unit in self._sharded.units:
            unit.changed()
        self._half_loaded = ""

    def _say_unused(self, checkpoint: Checkpoint) -> None:
        """Print the parameters whose optimizer state is not taken, because they are frozen now."""
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

    def _rest(self) -> None:
        """Bring everything to a stop: no step, gather or gradient is under way."""
        if self._shard_step is not None:
            self._shard_step.wait()
        for unit in self._sharded.units:
            if not unit.shard_params:
                unit.wait_unsharded()
        self._sharded.reshard_all()
        assert all(u.state is UnitState.UNSHARDED or u.shard_params for u in self._sharded.units)
        self._reducer.clear()
        self._comm.settle()
        self._comm.barrier()

    def _read(self, checkpoint: Checkpoint, states: bool) -> None:
        try:
            units, step = self._sharded.units, self._shard_step
            if not states or step is None:
                load_units(checkpoint, units)
            else:
                step.take_hyperparameters()
                slices = step.split(described(checkpoint))
                load_units(checkpoint, units, step.optimizer, slices)
                saved = checkpoint.manifest["optimizer"]
                restore_groups(step.optimizer, _decoded(checkpoint, WHOLE, saved["groups"]))
                step.show_hyperparameters()
            load_persistent(checkpoint, self._sharded)
        except DiskError as error:
            raise CheckpointError(f"rank {self._comm.rank}: {error}") from None

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What it holds besides values and optimizer state: ``engine``, ``loss_scaler``, ``scheduler``,
        ``data``, and this rank's own ``client_state`` (rank 0's if there were not as many ranks) and
        ``random`` generators (then None). Collective. Raises CheckpointError, the same on every rank.
        """

        def read() -> dict[str, Any]:
            manifest, rank = checkpoint.manifest, self._comm.rank
            found = {
                key: _decoded(checkpoint, WHOLE, manifest[key])
                for key in ("engine", "loss_scaler", "scheduler", "data", "client_state")
            }
            states = manifest["rank_states"]
            own = states[rank] if len(states) == self._comm.world_size else {}
            mine = {key: _decoded(checkpoint, rank_file(rank), value) for key, value in own.items()}
            return {"random": None, **found, **mine}

        folder, tag = checkpoint.folder.parent, checkpoint.folder.name
        found: dict[str, Any] = agree(
            self._comm.exchange, self._comm.rank, lambda: self._advised(folder, tag, read), own=True
        )
        return found


def _decoded(checkpoint: Checkpoint, file: str, value: Any) -> Any:
    """An entry of the manifest with its tensors, which are in ``file``. Raises CheckpointError."""
    return decode(value, lambda name: checkpoint.file(file).read_whole(name))
