"""The part of the engine that saves, loads, and stops when it is asked to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..config import Effective
from ..data import EngineLoader
from ..environment import read_environment
from ..handles import Handles
from ..log import say, warn
from ..offload.states import States
from ..optim.sharded_optimizer import ShardedOptimizer
from ..precision.loss_scaler import DeviceLossScaler, LossScaler
from ..precision.step_result import StepResult
from ..preemption import REQUEUE_EXIT_CODE
from ..report import announce
from ..zero.hooks import ShardedModel
from ..zero.ownership import VALUES
from ..zero.reduce import GradientReducer
from . import rng_state
from .export.consolidate import save_weights
from .format.commit import absolute
from .format.tensor_file import CheckpointError
from .load import groups_of
from .loader import Loader
from .saver import Saver

_FALLBACK_FOLDER = "checkpoints"


class Saving:
    """Checkpoints of an engine.

    Attributes
        client_state: called for the ``client_state`` of a save that a signal has asked for
            (``checkpoint.on_signal``); None for an empty one.
    """

    _sharded: ShardedModel
    _shard_step: ShardedOptimizer | None
    _reducer: GradientReducer
    _effective: Effective
    _scaler: LossScaler | DeviceLossScaler
    _result: StepResult | None
    _skipped_steps: int
    handles: Handles
    _saver: Saver
    _states: States
    _loader: Loader
    lr_scheduler: Any
    training_dataloader: EngineLoader | None
    global_steps: int
    micro_steps: int
    global_samples: int
    client_state: Callable[[], Mapping[str, Any]] | None = None
    _save_dir: Path | None
    """Where a save that a signal asks for goes, if the config says so."""
    if TYPE_CHECKING:  # the engine's

        def _settle(self) -> None: ...

        def _check_alive(self) -> None: ...

        def gradient_accumulation_steps(self) -> int: ...

        def zero_optimization_stage(self) -> int: ...

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training needs to go on exactly, as ``save_dir/tag``, whole or not at all.

        ``tag`` is by default ``global_stepN``; ``client_state`` is the caller's own: numbers, strings,
        tensors, and lists, tuples and dicts of them; each rank's is kept where they differ. ``save_latest``
        makes it the one that is loaded without a tag. With ``checkpoint.asynchronous`` the files are written
        while training goes on; a failure is raised by a later :meth:`step`. Collective. Raises
        CheckpointError, the same on every rank; the former checkpoint then stays as it was.
        """
        return self._save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def _save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool = True,
        exclude_frozen: bool = False,
        at_once: bool = False,
    ) -> bool:
        self._check_alive()
        self._states.check("engine.save_checkpoint()")
        self._settle()
        self._loader.check()
        self.handles.check()
        self.handles.bring_writes()
        left = self.micro_steps % self.gradient_accumulation_steps()
        if left and self._sharded.comm.rank == 0:
            warn(
                f"saving between two optimizer steps: the gradients of the last {left} micro-batches are not "
                "in the checkpoint"
            )
        steps, rank = self.global_steps, self._sharded.comm.rank

        def saved(path: Path) -> None:
            if save_latest and rank == 0:
                announce("checkpoint", folder=str(path.parent), tag=path.name, step=steps)

        self._saver.save(
            save_dir,
            str(tag) if tag is not None else f"global_step{self.global_steps}",
            self._facts,
            client_state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen,
            at_once=at_once,
            then=saved,
        )
        return True

    def _facts(self) -> dict[str, Any]:
        from zlaunch import __version__

        if self._shard_step is not None:
            self._shard_step.take_hyperparameters()
        optimizer = self._shard_step.optimizer if self._shard_step is not None else None
        groups = {"class": type(optimizer).__name__, "groups": groups_of(optimizer)} if optimizer else None
        schedule = None
        if hasattr(self.lr_scheduler, "state_dict"):
            schedule = {"class": type(self.lr_scheduler).__name__, "state": self.lr_scheduler.state_dict()}
        loader = self.training_dataloader
        return {
            "written_by": {"zlaunch": __version__, "torch": str(torch.__version__)},
            "stage": self.zero_optimization_stage(),
            "engine": {
                "global_steps": self.global_steps,
                "micro_steps": self.micro_steps,
                "global_samples": self.global_samples,
                "skipped_steps": self._skipped_steps,
            },
            "loss_scaler": {**self._scaler.state_dict(), "dynamic": True} if self._scaler.dynamic else None,
            "optimizer": groups,
            "scheduler": schedule,
            "data": loader.state_dict() if loader is not None else None,
            "config": json.loads(json.dumps(self._effective.loaded.raw, default=str)),
        }

    def wait_for_checkpoint(self) -> None:
        """Return when a save in the background has ended. To be called by all ranks. Raises what it failed
        with, CheckpointError for one.
        """
        self._saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what :meth:`save_checkpoint` has written, under any world size, stage, offload or precision.

        ``tag`` None takes what ``latest`` names, ``"auto"`` the newest checkpoint whose every byte is good.
        ``load_module_strict=False`` loads the parameters that both sides have. ``load_module_only`` leaves
        counters, schedule, optimizer and random generators as they are. The generators are restored when the
        world size is the saved one, the training_data loader goes on behind the last batch.

        Returns the checkpoint's path and the client_state that this rank has saved (rank 0's when the world
        size was another); ``(None, {})`` when ``load_dir`` has none, or is None. Collective. Raises
        CheckpointError, the same on every rank, for what is damaged, missing or of another model.
        """
        if load_dir is None:
            return None, {}
        self._check_alive()
        self._states.check("engine.load_checkpoint()")
        self.handles.take_unfrozen()
        self._settle()
        self._saver.wait()
        checkpoint = self._loader.open(load_dir, str(tag) if tag is not None else None)
        if checkpoint is None:
            return None, {}
        try:
            facts = self._loader.facts(checkpoint)
            schedule = facts["scheduler"] if load_lr_scheduler_states and not load_module_only else None
            self._check_schedule(checkpoint.folder, schedule)
            with_states = load_optimizer_states and not load_module_only
            self._loader.load(checkpoint, strict=load_module_strict, with_states=with_states)
            if not load_module_only:
                self._go_on_from(facts, schedule)
                if checkpoint.folder.parent == absolute(load_dir):
                    self._saver.folder = checkpoint.folder.parent
            if self._sharded.comm.rank == 0:
                saved = checkpoint.manifest
                say(
                    f"loaded {checkpoint.folder} (step {facts['engine']['global_steps']}, saved by "
                    f"{saved['world_size']} ranks at stage {saved['stage']})"
                )
            return str(checkpoint.folder), facts["client_state"]
        finally:
            checkpoint.close()

    def _check_schedule(self, folder: Path, saved: Mapping[str, Any] | None) -> None:
        kind = type(self.lr_scheduler).__name__
        if saved is None or self.lr_scheduler is None or saved["class"] in (None, kind):
            return
        raise CheckpointError(
            f"{folder}: has the state of the schedule {saved['class']}, and the engine's is {kind}: "
            "load_lr_scheduler_states=False begins it anew"
        )

    def _go_on_from(self, facts: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> None:
        counters = facts["engine"]
        self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
        self._skipped_steps = counters["skipped_steps"]
        micro = counters["micro_steps"]
        self.micro_steps = micro - micro % self.gradient_accumulation_steps()
        self._result = None
        if facts["loss_scaler"] is not None and self._scaler.dynamic:
            self._scaler.load_state_dict(facts["loss_scaler"])
        load = getattr(self.lr_scheduler, "load_state_dict", None)
        if schedule is not None and load is not None:
            load(schedule["state"])
        if facts["data"] is not None and self.training_dataloader is not None:
            self.training_dataloader.load_state_dict(facts["data"])
        if facts["random"] is not None:
            rng_state.restore(facts["random"], self._sharded.comm.device)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights in the compute dtype to one file. Collective.

        A name that ends in ``.safetensors`` gets that format. The file loads with plain torch; a failure to
        write raises OSError on every rank.
        """
        self._check_alive()
        self._states.check("engine.save_16bit_model()", VALUES)
        self.handles.check()
        save_weights(self._sharded, save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def _stop_if_asked(self, before: StepResult | None) -> None:
        """With ``checkpoint.on_signal``: save and end the process, if that has been asked for. Of several
        engines in a process the first that steps does so, for itself alone.

        On a GPU the answer of the last step may still be on its way; then the one before it counts, which is
        the same on all ranks, too.
        """
        section = self._effective.config.checkpoint
        if not section.on_signal or self._result is None:
            return
        known = self._result if self._result.known else before
        if known is not None and known.stop:
            self._save_and_stop()

    def _save_and_stop(self) -> NoReturn:
        folder = self._save_dir or self._saver.folder or read_environment().resume_dir or _FALLBACK_FOLDER
        rank = self._sharded.comm.rank
        if rank == 0:
            say(f"asked to stop: saving to {folder}")
        try:
            self._saver.wait()
        except Exception as error:  # an earlier save's; this one may succeed
            warn(str(error))
        state, problem = None, None
        if self.client_state is not None:
            try:
                state = self.client_state()
            except Exception as error:  # what is the engine's is worth saving by itself
                problem = f"rank {rank}: client_state failed: {type(error).__name__}: {error}"
        problems = [text for text in self._sharded.comm.exchange(problem) if text]
        try:
            if not problems:
                self._save(folder, None, state, at_once=True)
        except CheckpointError as error:
            problems = [str(error)]
        if problems:
            if rank == 0:
                warn(f"once more without client_state: {problems[0]}")
            try:
                self._save(folder, None, None, at_once=True)
            except CheckpointError as error:
                raise CheckpointError(f"asked to stop, but the state could not be saved: {error}") from None
        raise SystemExit(REQUEUE_EXIT_CODE)
