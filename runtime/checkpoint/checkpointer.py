"""Saves an engine's state and loads it again."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..config import Effective
from ..config.schema import CheckpointSection, without_secrets
from ..environment import read_environment
from ..log import counted, say, warn
from ..optim.step import ShardedOptimizer
from ..precision import DeviceLossScaler, LossScaler
from ..preemption import REQUEUE_EXIT_CODE
from ..report import announce
from ..zero.hooks import ShardedModel
from . import agree
from .agree import all_or_none
from .format.commit import SaveTarget, absolute
from .format.jsonable import encode
from .format.manifest import WHOLE, Checkpoint
from .format.tensor_file import CheckpointError
from .load import (
    OF_SCHEDULES,
    check_fits,
    choose_target,
    decoded,
    groups_of,
    open_chosen,
    quiesce,
    restore_shards,
    with_advice,
)
from .save import BackgroundSave, Save, Source, rank_file
from .shard_io import describe

if TYPE_CHECKING:
    from ..engine import Engine
    from ..offload.transfer import HostLink

_BASE_RATE = "initial_lr"
"""The key of a parameter group in which torch's schedulers keep the rate that they start from."""
_ARRAY_TASK = "array_task"
"""The key of ``written_by`` with the task of a SLURM job array that has saved."""
_ON_SIGNAL = "on_signal"
"""The key of ``written_by`` that marks a save which a signal has asked for."""
_BATCH = "train_batch_size"
"""The key of ``engine`` with the global batch of the last step."""
_FALLBACK_FOLDER = "checkpoints"
_COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
"""Names what an engine counts."""


class Checkpointer:
    """Saves and loads one engine: its shards, optimizer state, counters, schedule and random generators."""

    def __init__(
        self,
        run: Engine,
        sharded: ShardedModel,
        shard_step: ShardedOptimizer | None,
        *,
        scaler: LossScaler | DeviceLossScaler,
        effective: Effective,
        link: HostLink,
        save_weights: Callable[..., Any],
        options: CheckpointSection | None = None,
        is_needed: bool = True,
    ) -> None:
        """Keep what is saved. ``link`` copies snapshots to the host, ``save_weights`` writes all weights.
        ``options`` are those of the config if they are not given. ``is_needed``: see BackgroundSave.
        """
        self._run = run
        self._sharded = sharded
        self._shard_step = shard_step
        self._comm = sharded.comm
        self._scaler = scaler
        self._link = link
        self._raw_config = without_secrets(effective.loaded.raw)
        self._stage = int(effective.config.zero_optimization.stage)
        self._rounds_masters = not effective.config.zero_optimization.load_from_fp32_weights
        self._options = options or effective.config.checkpoint
        self._background = BackgroundSave(sharded.comm, link, is_needed=is_needed)
        self._half_loaded = ""
        """Why the last load has ended half-way; empty if it has not."""
        self._stop_folder = absolute(self._options.save_dir) if self._options.save_dir else None
        """Folder of the save that a signal asks for, if the config names one."""
        self._folder: Path | None = None
        """Folder of the last save, or of the checkpoint that the run was resumed from."""
        self._saves_for_stop = False
        """Marks the save that a signal has asked for."""
        self._has_saved = False
        """Tells that the script has saved, and that the folder of its saves was checked."""
        self._has_checked_state = False
        self.save_weights = save_weights

    def check_state(self) -> None:
        """Warn after the first step of optimizer state that no checkpoint can have, before a save fails."""
        if self._has_checked_state or self._shard_step is None:
            return
        self._has_checked_state = True
        optimizer = self._shard_step.optimizer
        try:
            for part in self._shard_step.slices:
                describe(part, optimizer.state, type(optimizer).__name__)
        except CheckpointError as error:
            warn(f"save_checkpoint will fail: {error}")

    def wait(self) -> None:
        """Wait for a background save to end. Collective. Raises its error, such as CheckpointError."""
        self._background.wait()

    def poll(self) -> None:
        """Raise what a save in the background has failed with. Collective."""
        self._background.poll()

    def close(self) -> None:
        """End a background save; the engine is destroyed."""
        self._background.close()

    def check(self) -> None:
        """Raise CheckpointError if a load has ended half-way: there are values of two states then."""
        if self._half_loaded:
            raise CheckpointError(
                f"the last load_checkpoint failed halfway ({self._half_loaded}): load a checkpoint first"
            )

    # -- saving

    def after_step(
        self, prepare_save: Callable[[], None], client_state: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """Raise what a save in the background has failed with. Collective."""
        self.poll()

    def prepare(self) -> None:
        """Take the memory for snapshots beside training, once all state is there: after the first step."""
        if self._options.is_asynchronous:
            self._background.reserve(lambda: Save.resident_bytes(*self._describe(Path(), "", "", {}, None)))

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool = True,
        exclude_frozen: bool = False,
        *,
        at_once: bool = False,
    ) -> None:
        """Save under ``folder/tag``; in the background where that is configured. Collective.

        Args:
            folder: Folder of checkpoints, equal on all ranks unless nodes have separate folders.
            tag: Name of this checkpoint; rank 0's counts. None is ``global_stepN``.
            client_state: The script's values and tensors; each rank's is saved.
            save_latest: Let the file ``latest`` name this checkpoint.
            exclude_frozen: Leave frozen parameters out.
            at_once: Return when the checkpoint is on the disk, even if the config says ``asynchronous``.

        Raises:
            CheckpointError: On every rank, with one text; the former checkpoints are unchanged.
        """
        comm = self._comm
        run = self._run
        options = self._options
        steps = run.global_steps
        left = run.unstepped_micro_batches
        if left and comm.rank == 0:
            warn(
                "saving between two optimizer steps: the checkpoint does not contain the gradients of the "
                f"last {left} micro-batch{'es' if left > 1 else ''}"
            )
        # One save at a time: the next snapshot uses the memory of the former one again, and its failure must
        # be raised before it is replaced.
        self.wait()
        wanted = str(tag) if tag is not None else f"global_step{steps}"
        chosen = choose_target(
            comm,
            absolute(folder),
            wanted,
            node_local=options.use_node_local_storage,
            validation=options.tag_validation,
        )

        def describe() -> tuple[Source, SaveTarget]:
            return self._describe(chosen.folder, chosen.tag, chosen.owner, self._facts(), client_state)

        # An object in client_state that cannot be saved is an error before the folder is made.
        source, target = all_or_none(comm.exchange, comm.rank, describe, own=True)
        target = replace(target, save_latest=save_latest, exclude_frozen=exclude_frozen)
        save = Save(self._without_repetition(source), target, self._link)
        self._check_stop_folder(chosen.folder)
        self._folder = chosen.folder

        def tell(path: Path) -> None:
            self._tell(path, steps, save_latest)

        if options.is_asynchronous and not at_once:
            self._background.start(save, tell)
        else:
            save.begin(None)
            tell(save.finish(comm.exchange))

    def _tell(self, path: Path, steps: int, is_latest: bool) -> None:
        """Tell the launcher of a checkpoint that is there now."""
        if is_latest and self._comm.rank == 0:
            announce("checkpoint", folder=str(path.parent), tag=path.name, step=steps)

    def save_and_exit(self, client_state: Callable[[], Mapping[str, Any]] | None) -> NoReturn:
        """Save because the run was asked to stop, and end the process with REQUEUE_EXIT_CODE.

        Saves once more without what ``client_state`` returns where that fails. Collective. Raises
        CheckpointError.
        """
        comm = self._comm
        folder = self._stop_folder or self._folder or read_environment().resume_dir or _FALLBACK_FOLDER
        if comm.rank == 0:
            unset = (
                "" if client_state is not None else ", without client_state: engine.client_state is not set"
            )
            say(f"stop requested: saving to {folder}{unset}")
        self._saves_for_stop = True
        try:
            self.wait()
        except Exception as error:  # an earlier save's; this one may succeed
            warn(str(error))
        try:
            state = all_or_none(comm.exchange, comm.rank, client_state or dict, own=True)
            self.save(folder, None, state, at_once=True)
        except CheckpointError as problem:
            if comm.rank == 0:
                warn(f"saving again without client_state: {problem}")
            try:
                self.save(folder, None, None, at_once=True)
            except CheckpointError as error:
                raise CheckpointError(f"stop requested, but saving failed: {error}") from None
        raise SystemExit(REQUEUE_EXIT_CODE)

    def _counters(self) -> dict[str, Any]:
        """Return the engine's counters without the micro-batches whose gradients are not saved."""
        found = {name: getattr(self._run, name) for name in _COUNTERS}
        if self._shard_step is not None:
            found |= self._shard_step.method.counters()
        return {**found, "micro_steps": self._run.micro_steps - self._run.accumulated}

    def _facts(self) -> dict[str, Any]:
        """Return the manifest's entries about the run."""
        from zlaunch import __version__

        run = self._run
        step = self._shard_step
        optimizer = schedule = None
        if step is not None:
            # The script sets rates on its own optimizer object; the inner optimizer has them only after this.
            step.take_hyperparameters()
            optimizer = {"class": type(step.optimizer).__name__, "groups": groups_of(step.optimizer)}
        if hasattr(run.lr_scheduler, "state_dict"):
            schedule = {"class": type(run.lr_scheduler).__name__, "state": run.lr_scheduler.state_dict()}
        task = read_environment().array_task
        array_task = {} if task is None else {_ARRAY_TASK: task}
        on_signal = {_ON_SIGNAL: True} if self._saves_for_stop else {}
        counters = {**self._counters(), _BATCH: run.train_batch_size(), "batches": run.batch_history()}
        return {
            "written_by": {
                "zlaunch": __version__,
                "torch": str(torch.__version__),
                **array_task,
                **on_signal,
            },
            "stage": self._stage,
            "engine": counters,
            "loss_scaler": {**self._scaler.state_dict(), "dynamic": True} if self._scaler.dynamic else None,
            "optimizer": optimizer,
            "scheduler": schedule,
            "data": run.data_positions() or None,
            "config": json.loads(json.dumps(self._raw_config, default=str)),
        }

    def _describe(
        self, folder: Path, tag: str, owner: str, facts: Mapping[str, Any], client_state: Any
    ) -> tuple[Source, SaveTarget]:
        """Return what this rank saves, and where to."""
        rank = self._comm.rank
        step = self._shard_step
        options = self._options
        if step is not None:
            # A step in the background still changes the masters and the state that are described here.
            step.wait()
        tensors: dict[str, torch.Tensor] = {}
        rank_tensors: dict[str, torch.Tensor] = {}
        entries = {name: encode(value, tensors, name) for name, value in facts.items()}
        if client_state is not None and not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}: it has to be a dict")
        entries["client_state"] = encode(client_state or {}, tensors, "client_state")
        # Encoded twice: a load on as many ranks gives each rank its own client_state, a load on another
        # number rank 0's.
        own = encode(client_state or {}, rank_tensors, "client_state")
        if options.is_asynchronous:  # the caller may change them while they are written
            rank_tensors = {name: value.detach().cpu().clone() for name, value in rank_tensors.items()}
        random = encode(agree.capture(self._comm.device), rank_tensors, "random")
        source = Source(
            sharded=self._sharded,
            slices=step.slices if step is not None else [],
            state=step.optimizer.state if step is not None else {},
            optimizer=type(step.optimizer if step is not None else None).__name__,
            facts=entries,
            tensors=tensors,
            rank_facts={"random": random, "client_state": own},
            rank_tensors=rank_tensors,
        )
        node_local = options.use_node_local_storage
        target = SaveTarget(
            folder=folder,
            tag=tag,
            keep_last=options.keep_last,
            owner=owner,
            leader=self._leads_node() if node_local else rank == 0,
            host=socket.gethostname() if node_local else None,
        )
        return source, target

    def _leads_node(self) -> bool:
        """Tell whether this rank writes what its node has once."""
        return read_environment().index_on_node == 0

    def _without_repetition(self, source: Source) -> Source:
        """Leave out this rank's client_state where it equals rank 0's, which is kept anyway. Collective.

        Nodes with folders of their own do not see what rank 0 has kept.
        """
        if self._options.use_node_local_storage:
            return source
        own = {name: t for name, t in source.rank_tensors.items() if name.startswith("client_state.")}
        digest = hashlib.sha256(json.dumps(source.rank_facts["client_state"]).encode())
        for tensor in own.values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if digest.hexdigest() != self._comm.exchange(digest.hexdigest())[0]:
            return source
        rest = {name: tensor for name, tensor in source.rank_tensors.items() if name not in own}
        return replace(source, rank_facts={"random": source.rank_facts["random"]}, rank_tensors=rest)

    # -- loading

    def load(
        self,
        folder: str | os.PathLike[str] | None,
        tag: str | None,
        *,
        strict: bool,
        with_optimizer: bool,
        with_schedule: bool,
        with_run: bool,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of any number of ranks, stage or offload. Collective.

        Args:
            folder: Folder of checkpoints, or of one checkpoint. None loads nothing.
            tag: Name of a checkpoint; "auto" for the newest whole one; None for what ``latest`` names.
            strict: Names of parameters must agree with the model's.
            with_optimizer: Load the optimizer's state and its groups.
            with_schedule: Load the learning-rate schedule.
            with_run: Load counters, data position and random generators.
            missing_ok: A folder that does not exist is like one without a checkpoint.

        Returns:
            The checkpoint's path and this rank's client_state; ``(None, {})`` without a checkpoint.

        Raises:
            CheckpointError: On every rank. After one that came halfway, the engine refuses to train until a
                load succeeds.
        """
        if folder is None:
            return None, {}
        # A save in the background may be writing the checkpoint that is loaded.
        self.wait()
        folder = absolute(folder)
        node_local = self._options.use_node_local_storage
        tag = str(tag) if tag is not None else None
        told = read_environment().resume_dir  # the launcher's choice, which the script cannot have mistyped
        optional = missing_ok or (told is not None and absolute(told) == folder)
        checkpoint = open_chosen(self._comm, folder, tag, node_local=node_local, missing_ok=optional)
        if checkpoint is None:
            if self._comm.rank == 0 and not missing_ok:
                warn(f"{folder}: no checkpoint found, training starts from step 0")
            return None, {}
        try:
            # All that can fail without changing a value comes first: reading the facts, then the checks.
            facts = self._read_facts(checkpoint)
            schedule = facts["scheduler"] if with_schedule else None
            self._check_schedule(checkpoint, schedule)
            step = self._shard_step if with_optimizer else None
            check_fits(checkpoint, self._sharded, step, strict=strict)
            quiesce(self._sharded, self._shard_step)
            # Read before the load replaces them.
            given = self._base_rates()
            # Set before the first value changes and cleared after the last one: whatever ends the load in
            # between, check() then refuses to train or save a mixture of two states.
            self._half_loaded = "another rank failed"
            try:
                restore_shards(
                    checkpoint,
                    self._sharded,
                    step,
                    keep=self._kept_entries(schedule),
                    rounded=self._rounds_masters,
                )
            except CheckpointError as error:
                self._half_loaded = str(error)
                raise
            self._half_loaded = ""
            if with_run:
                self._restore_training_state(facts, schedule)
                # `folder` may be one checkpoint itself. A save that a signal asks for must not go into that.
                if checkpoint.folder.parent == folder:
                    self._folder = folder
            if self._comm.rank == 0:
                saved = checkpoint.manifest
                say(
                    f"loaded {checkpoint.folder} (step {facts['engine']['global_steps']}, saved by "
                    f"{counted(saved['world_size'], 'rank')} at stage {saved['stage']})"
                )
                if with_run:
                    self._tell_batch(facts["engine"], saved["world_size"])
                    _warn_of_another_task(checkpoint)
                    _tell_of_no_client_state(checkpoint, facts["client_state"])
                self._tell_rates(given)
            return str(checkpoint.folder), facts["client_state"]
        finally:
            checkpoint.close()

    def _read_facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Read the checkpoint's entries besides values and optimizer state: ``engine``, ``loss_scaler``,
        ``scheduler``, ``data``, and this rank's ``client_state`` and ``random`` generators (rank 0's and None
        if it was not saved by as many ranks). Collective.
        """

        def read() -> dict[str, Any]:
            manifest = checkpoint.manifest
            rank = self._comm.rank
            found = {
                key: decoded(checkpoint, WHOLE, manifest[key])
                for key in ("engine", "loss_scaler", "scheduler", "data", "client_state")
            }
            states = manifest["rank_states"]
            own = states[rank] if len(states) == self._comm.world_size else {}
            mine = {key: decoded(checkpoint, rank_file(rank), value) for key, value in own.items()}
            return {"random": None, **found, **mine}

        found: dict[str, Any] = all_or_none(
            self._comm.exchange, self._comm.rank, lambda: with_advice(checkpoint.folder, read), own=True
        )
        return found

    def _check_schedule(self, checkpoint: Checkpoint, saved: Mapping[str, Any] | None) -> None:
        scheduler = self._run.lr_scheduler
        kind = type(scheduler).__name__
        if saved is not None and scheduler is not None and saved["class"] not in (None, kind):
            section = (checkpoint.manifest.get("config") or {}).get("scheduler") or {}
            same = f"keep scheduler.type {section['type']} in" if "type" in section else "omit scheduler in"
            raise CheckpointError(
                f"{checkpoint.folder}: has the state of the scheduler {saved['class']}, but the engine has "
                f"{kind}: pass load_lr_scheduler_states=False to restart the schedule; with the Trainer, "
                f"{same} the config"
            )

    def _kept_entries(self, schedule: Mapping[str, Any] | None) -> tuple[str, ...]:
        """Name the entries of parameter groups that a load leaves as they are: a schedule for which no state
        is loaded starts from the configured rate. One without a state of its own continues from the groups.
        """
        starts = schedule is None and hasattr(self._run.lr_scheduler, "load_state_dict")
        return OF_SCHEDULES if starts else ()

    def _check_stop_folder(self, folder: Path) -> None:
        """Warn at the script's first save where a signal's save would go elsewhere."""
        if self._has_saved or self._saves_for_stop or not self._options.on_signal or self._comm.rank:
            return
        self._has_saved = True
        if self._stop_folder not in (None, folder):
            warn(
                f"the script saves to {folder}, but a save on a signal goes to checkpoint.save_dir "
                f"({self._stop_folder}): remove save_dir, or save to it, too"
            )

    def _base_rates(self) -> dict[int, tuple[str, float]]:
        """Return for each parameter group, by its index, the key and the learning rate before a schedule,
        which may be the script's own; none if the engine's schedule computes its rates from the config alone,
        which a load does not change.
        """
        keys = (_BASE_RATE,) if self._run.lr_scheduler is not None else (_BASE_RATE, "lr")
        found: dict[int, tuple[str, float]] = {}
        for index, group in enumerate(self._param_groups()):
            # An optimizer that computes its own rate has None.
            key = next((key for key in keys if group.get(key) is not None), None)
            if key is not None:
                found[index] = (key, float(group[key]))
        return found

    def _param_groups(self) -> list[dict[str, Any]]:
        step = self._shard_step
        if step is None:
            return []
        step.take_hyperparameters()
        return step.optimizer.param_groups

    def _tell_batch(self, counters: Mapping[str, int], ranks: int) -> None:
        """Say in a line that the global batch differs from the checkpoint's, as the number of ranks does."""
        steps = counters["global_steps"]
        now = self._run.train_batch_size()
        if ranks == self._comm.world_size or not steps or self._run.is_batch_size_open:
            return
        before = counters.get(_BATCH)
        rest = 0
        if not before:
            # By a former version, or DeepSpeed. Wrong only where the batch has changed before.
            before, rest = divmod(counters["global_samples"], steps)
        if rest or before == now:
            return
        accumulation = self._run.gradient_accumulation_steps()
        more, rest = divmod(before * accumulation, now)
        is_exact = more > 0 and rest == 0
        here = counted(self._comm.world_size, "rank")
        samples = self._comm.mesh.samples
        if before % samples:
            advice = f"{before} cannot be kept: it is not a multiple of {samples}"
        elif is_exact:
            advice = f"to keep {before}, {self._run.how_to_accumulate(more)}"
        else:
            micro = before / (samples * accumulation)
            size = (
                f"set train_micro_batch_size_per_gpu to {micro:g}" if micro % 1 == 0 else "change both sizes"
            )
            advice = f"to keep {before}, {size}"
        say(f"the global batch is {now} on {here}, and was {before} on {ranks}; {advice}")

    def _tell_rates(self, given: Mapping[int, tuple[str, float]]) -> None:
        """Tell the user that the checkpoint's learning rate has replaced another one."""
        groups = self._param_groups()
        for index, (key, mine) in given.items():
            loaded = float(groups[index][key])
            if mine == loaded:
                continue
            group = f" of parameter group {index}" if len(given) > 1 else ""
            change = f'optimizer.param_groups[{index}]["lr"]'
            if key == _BASE_RATE:  # the scheduler has the rate, too
                change += f" and the scheduler's base_lrs[{index}]"
            warn(
                f"the learning rate{group} is {loaded:g} from the checkpoint, not {mine:g} as configured; to "
                f"change it, set {change} after the load (with a Trainer: in on_train_begin)"
            )
            return

    def _restore_training_state(self, facts: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> None:
        """Restore counters, loss scale, schedule, data loader and random generators."""
        run = self._run
        run.restore_counters(facts["engine"])
        if facts["loss_scaler"] is not None and self._scaler.dynamic:
            self._scaler.load_state_dict(facts["loss_scaler"])
        load = getattr(run.lr_scheduler, "load_state_dict", None)
        if schedule is not None and load is not None:
            load(schedule["state"])
        if (found := facts["data"]) is not None:
            # Versions up to 0.2 had one loader.
            run.load_data_positions([found] if isinstance(found, Mapping) else found)
        if facts["random"] is not None:
            agree.restore(facts["random"], self._comm.device)


def _tell_of_no_client_state(checkpoint: Checkpoint, client_state: Mapping[str, Any]) -> None:
    """Say why a checkpoint lacks what the script's own saves have: a script may fail at the missing key."""
    if checkpoint.manifest["written_by"].get(_ON_SIGNAL) and not client_state:
        say(
            f"{checkpoint.folder.name} was saved on a signal and has no client_state: set "
            "engine.client_state to a function that returns it"
        )


def _warn_of_another_task(checkpoint: Checkpoint) -> None:
    """Warn that another task of a job array has saved the checkpoint: this task may train nothing more."""
    saver = checkpoint.manifest["written_by"].get(_ARRAY_TASK)
    mine = read_environment().array_task
    if None in (saver, mine) or saver == mine:
        return
    warn(
        f"{checkpoint.folder} was saved by task {saver} of a job array, and this is task {mine}: tasks that "
        "share a checkpoint folder continue each other's training. Put SLURM_ARRAY_TASK_ID into its name"
    )
