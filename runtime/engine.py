"""Defines the engine: a model's training loop, its checkpoints, and moving its states off the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from torch import Tensor

from .config import Config
from .loop import TrainingLoop
from .precision.step_result import StepResult
from .zero import placeholder
from .zero.ownership import GRADIENTS, VALUES

if TYPE_CHECKING:
    from .checkpoint.checkpointer import Checkpointer


_engines: WeakSet[Engine] = WeakSet()


def engine_of(parameter: Tensor) -> Engine | None:
    """Return the live engine that trains a parameter."""
    unit = placeholder.owner(parameter)
    if unit is None:
        return None
    return next((e for e in _engines if any(unit is own for own in e._sharded.units)), None)


class MovableStates(Protocol):
    """Moves states of an engine to host memory for a while, and brings them back."""

    def check(self, what: str, *needed: str) -> None:
        """Raise OffloadedError if a state that ``what`` needs (any, where none is named) has been moved."""

    def move(self, include: Container[str] | None, device: Any, *, pin: bool, non_blocking: bool) -> None: ...
    def reload(self, *, non_blocking: bool) -> None: ...
    def close(self) -> None: ...


class Engine(TrainingLoop):
    """Train a model; built by :func:`zlaunch.initialize`. Unknown attributes are looked up on the model.

    Attributes:

    - ``module``: the model passed to ``initialize``, with its parameters in flat units.
    - ``optimizer``: the optimizer passed to ``initialize`` or built from the config. Its ``param_groups``
      have the model's parameters, and its methods call the engine.
    - ``lr_scheduler``: stepped by :meth:`step`, or None.
    - ``global_steps``, ``skipped_steps``, ``micro_steps``, ``global_samples``: counters.
    - ``overflow``: whether the last step was skipped because gradients were not finite.
    - ``monitor``: ``write_events([(name, value, step), ...])`` logs to the trackers of the config.
    - ``should_stop``: whether the run should save and stop (SIGUSR1, preemption). Updated by each step, equal
      on all ranks.
    - ``client_state``: a function that returns the ``client_state`` for saves on a signal
      (``checkpoint.on_signal``), or None.

    On a GPU, reading ``overflow``, ``skipped_steps``, ``should_stop``, ``loss_scale`` or the gradient norm
    synchronizes with the device; a training loop that reads none of them never waits. With fp16 the scheduler
    steps at the next such read, or with the next optimizer step.
    """

    optimizer_class: type[Any] | None = None
    """Names the base class for the optimizer, a subclass of ZeroOptimizer; None for ZeroOptimizer."""
    client_state: Callable[[], Mapping[str, Any]] | None = None
    checkpoints: Checkpointer
    _destroyed = False

    def attach(
        self,
        *,
        checkpoints: Checkpointer,
        states: MovableStates,
        offload: Any,
        monitor: Any,
        around: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Take the parts that the assembly has built for this engine; called once, before anything else.

        ``offload`` keeps states off the device, None where all stay there; ``monitor`` has ``write_events``;
        ``around`` gives a context for each ``"forward"`` (with the model's arguments, a tuple and a dict),
        ``"backward"`` and ``"step"``.
        """
        self.checkpoints, self._states = checkpoints, states
        self._offload, self.monitor, self._around = offload, monitor, around
        self._sharded.before_forward = self._before_forward
        self._sharded.engine = self
        _engines.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    # -- its parts

    @property
    def config(self) -> dict[str, Any]:
        """Return the config as passed to ``initialize``."""
        return self._effective.loaded.raw

    @property
    def effective_config(self) -> Config:
        """Return the config with all defaults and "auto" values filled in."""
        return self._effective.config

    @property
    def optimizer(self) -> Any:
        """Return the optimizer, an instance of its original class and of ZeroOptimizer."""
        return self.torch_optimizer

    # -- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        self._states.check("a forward pass", VALUES)
        self.checkpoints.check()
        with self._around("forward", args, kwargs):
            return super().forward(*args, **kwargs)

    def _before_forward(self) -> None:
        self._states.check("a forward pass", VALUES)
        self.handles.take_unfrozen()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate the loss of one micro-batch (mean over its samples) and return the loss.

        Divides the loss by the number of micro-batches in a step first; pass ``scale_wrt_gas=False`` if the
        script has divided it. :meth:`step` averages gradients over the ranks.
        """
        self._check_alive()
        self._states.check("engine.backward()", VALUES, GRADIENTS)
        with self._around("backward"):
            return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: Any = None) -> None:
        """Update the parameters and step the scheduler at the accumulation boundary; else only count.

        The update averages, unscales and clips the gradients. ``lr_kwargs`` go to the scheduler's step. With
        ``checkpoint.on_signal``, the first step after SIGUSR1 saves and ends the process.

        Raises:
            CheckpointError: a background save failed.
            LossScaleFloorError: fp16 gradients overflow at the minimum loss scale; names the parameters.
        """
        self._check_alive()
        self._states.check("engine.step()")
        self.checkpoints.check()
        before, is_boundary = self._result, self.is_gradient_accumulation_boundary()
        if is_boundary and self.global_steps:
            self.checkpoints.prepare()
        with self._around("step"):
            super().step(lr_kwargs)
        if is_boundary:
            self._stop_if_asked(before)
            self.checkpoints.after_step(self._prepare_save, self.client_state)

    def _stop_if_asked(self, before: StepResult | None) -> None:
        """Save and end the process if a signal has asked for that and ``checkpoint.on_signal`` is set. Where
        a process has several engines, the first that steps does so, and saves only itself.

        On a GPU the last step's result may still be on its way; then the one before it decides, which is
        equal on all ranks, too.
        """
        if not self.effective_config.checkpoint.on_signal or self._result is None:
            return
        known = self._result if self._result.known else before
        if known is not None and known.stop:
            self._prepare_save()
            self.checkpoints.save_and_exit(self.client_state)

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the full training state atomically under ``save_dir/tag``. Collective.

        With ``checkpoint.asynchronous``, the files are written in the background, and a later :meth:`step`
        raises errors.

        Args:
            save_dir: Folder for all checkpoints of the run.
            tag: Name of this checkpoint; ``global_stepN`` by default.
            client_state: The script's state: numbers, strings, tensors, and lists, tuples and dicts of them.
                Saved per rank if ranks differ.
            save_latest: Load this checkpoint by default, without a tag.
            exclude_frozen_parameters: Leave out frozen parameters.

        Raises CheckpointError on every rank; the previous checkpoint is then unchanged.
        """
        self._prepare_save()
        self.checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def _prepare_save(self) -> None:
        self._check_alive()
        self._states.check("engine.save_checkpoint()")
        self._resolve_last_step()
        self.checkpoints.check()
        self.handles.check()
        self.handles.bring_writes()

    def wait_for_checkpoint(self) -> None:
        """Wait for a background save to end. Collective. Raises its error, such as CheckpointError."""
        self.checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of :meth:`save_checkpoint`, with any world size, stage, offload or precision.

        The training_data loader resumes after the last batch. Random generators are restored if the world
        size is the same. Collective.

        Args:
            load_dir: Folder passed to :meth:`save_checkpoint`, or None to load nothing.
            tag: Checkpoint to load; None for the one that ``latest`` names, ``"auto"`` for the newest one
                that passes verification.
            load_module_strict: Require equal parameter names. False loads the parameters that match.
            load_optimizer_states: Load the optimizer's state.
            load_lr_scheduler_states: Load the scheduler's state.
            load_module_only: Load only the model: no counters, scheduler, optimizer or random generators.
            missing_ok: Do not warn if there is no checkpoint, and do not require the folder to exist.

        Returns:
            The checkpoint's path and this rank's client_state (rank 0's if the world size differs). ``(None,
            {})`` if ``load_dir`` is None or has no checkpoint.

        Raises CheckpointError on every rank if the folder does not exist, or the checkpoint is damaged,
        incomplete or of another model.
        """
        self._check_alive()
        self._states.check("engine.load_checkpoint()")
        self.handles.take_unfrozen()
        self._resolve_last_step()
        return self.checkpoints.load(
            load_dir,
            tag,
            strict=load_module_strict,
            with_optimizer=load_optimizer_states and not load_module_only,
            with_schedule=load_lr_scheduler_states and not load_module_only,
            with_run=not load_module_only,
            missing_ok=missing_ok,
        )

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full model's weights in the compute dtype to one file. Collective.

        The file loads with plain torch, or with safetensors if the name ends in ``.safetensors``. Raises
        OSError on every rank if writing fails.
        """
        self._check_alive()
        self._states.check("engine.save_16bit_model()", VALUES)
        self.handles.check()
        self.checkpoints.save_weights(save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    # -- states in host memory

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until :meth:`reload_states`, for example to free memory for inference.
        Collective, between two passes.

        Until then, passes that need a moved state raise OffloadedError: a forward pass needs ``lp_params``, a
        backward pass also ``lp_grads``, a step or a checkpoint all states. Module buffers stay on the device.
        Several calls add up.

        Args:
            include: States to move: ``optim_states``, ``hp_params`` (fp32 master weights), ``lp_params``
                (parameters in the compute dtype), ``lp_grads``, ``contiguous_grad_buffer``; None for all. At
                stage 3 and in fp32 training, ``hp_params`` and ``lp_params`` share memory, so name both.
            device: ``"cpu"``.
            pin_memory: Use pinned host memory, which is kept for the next call.
            non_blocking: Return before the copies end.

        Raises OffloadedError if the config already offloads, ValueError for other names or devices.
        """
        self._check_alive()
        self._states.move(include, device, pin=bool(pin_memory), non_blocking=bool(non_blocking))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states of :meth:`offload_states` back to the device, bit for bit. Collective.

        With ``non_blocking``, only later work on the device waits for the copies. Raises
        torch.OutOfMemoryError if the device lacks memory; free some and call it again.
        """
        self._check_alive()
        self._states.reload(non_blocking=bool(non_blocking))

    # -- ending

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this engine was destroyed, or its model was passed to another engine")

    def destroy(self) -> None:
        """Turn the model back into a plain module with its current values, and release communicators.
        Collective. A second call does nothing.

        The optimizer becomes a plain one. It keeps its state at stage 0 or on one rank, without offload;
        otherwise its next step raises OptimizerError.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._sharded.engine = None
        with ExitStack() as stack:  # every part is closed, whatever fails
            stack.callback(self._sharded.comm.close)
            if self._offload is not None:
                stack.callback(self._offload.close)
            stack.callback(self._sharded.close)
            stack.callback(self.handles.release, has_stepped=self.global_steps > 0)
            if self._shard_step is not None:
                stack.callback(self._shard_step.finish)
            stack.callback(self.checkpoints.close)
            stack.callback(self.monitor.close)
            stack.callback(self._states.close)
            stack.callback(self._states.reload, non_blocking=False)
