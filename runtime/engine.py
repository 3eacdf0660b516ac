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
    """Trains a model; built by :func:`zlaunch.initialize`. Unknown attributes are looked up on the model.

    Attributes:

    - ``module``: the model that was given, its parameters now in flat units.
    - ``optimizer``: the optimizer that was given or made; ``param_groups`` are live, with the model's
      parameters, and its methods lead here.
    - ``lr_scheduler``: stepped by :meth:`step`, or None.
    - ``global_steps``, ``skipped_steps``, ``micro_steps``, ``global_samples``: counters.
    - ``overflow``: whether the last step was skipped because gradients were not finite.
    - ``monitor``: ``write_events([(name, value, step), ...])`` adds to the trackers of the config.
    - ``should_stop``: the run has been asked to save and stop (SIGUSR1, a preemption); known after a step,
      equal on all ranks.
    - ``client_state``: called for the ``client_state`` of a save that a signal has asked for
      (``checkpoint.on_signal``); None for an empty one.

    On a GPU, ``overflow``, ``skipped_steps``, ``should_stop``, ``loss_scale`` and the gradient norm are on
    the device until they are asked for, which waits for it; a training loop that does not ask never waits.
    With fp16 the scheduler's step follows at the next of these, or with the next optimizer step.
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
        """Return the config as it was given."""
        return self._effective.loaded.raw

    @property
    def effective_config(self) -> Config:
        """Return the config with every default and "auto" filled in."""
        return self._effective.config

    @property
    def optimizer(self) -> Any:
        """Return the optimizer that was given or built, an instance of its class and a ZeroOptimizer."""
        return self.torch_optimizer

    # -- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._states.check("a forward pass", VALUES)
        self.checkpoints.check()
        with self._around("forward", args, kwargs):
            return super().forward(*args, **kwargs)

    def _before_forward(self) -> None:
        self._states.check("a forward pass", VALUES)
        self.handles.take_unfrozen()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate one micro-batch's loss (mean over its samples); return the loss.

        The loss is divided by the number of micro-batches first, so that gradient hooks see a step's mean;
        with ``scale_wrt_gas=False`` the caller has divided already. The ranks' mean is taken by :meth:`step`.
        """
        self._check_alive()
        self._states.check("engine.backward()", VALUES, GRADIENTS)
        with self._around("backward"):
            return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: Any = None) -> None:
        """Average, unscale, clip and apply the gradients at the accumulation boundary, and step the
        scheduler; else only count. ``lr_kwargs`` go to the scheduler's step.

        With ``checkpoint.on_signal`` the first step after SIGUSR1 saves and ends the process. Raises
        CheckpointError when a save in the background has failed; LossScaleFloorError, naming parameters, when
        fp16 gradients overflow at the smallest loss scale.
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
        """Save everything that training needs to go on exactly, as ``save_dir/tag``, whole or not at all.

        ``tag`` is by default ``global_stepN``; ``client_state`` is the caller's: numbers, strings, tensors,
        and lists, tuples and dicts of them; each rank's is kept where they differ. ``save_latest`` makes it
        the one that is loaded without a tag. With ``checkpoint.asynchronous`` the files are written while
        training goes on; a failure is raised by a later :meth:`step`. Collective. Raises CheckpointError on
        every rank; the former checkpoint then stays as it was.
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
        """Wait until a background save has ended. All ranks must call it. Raises the save's error, such as
        CheckpointError.
        """
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
        """Load what :meth:`save_checkpoint` has written, under any world size, stage, offload or precision.

        ``tag`` None takes what ``latest`` names, ``"auto"`` the newest checkpoint whose every byte is good.
        ``load_module_strict=False`` loads the parameters that both sides have. ``load_module_only`` leaves
        counters, schedule, optimizer and random generators as they are. The generators are restored when the
        world size is the saved one, the training_data loader goes on behind the last batch.

        Returns the checkpoint's path and the client_state that this rank has saved (rank 0's when the world
        size was another). Returns ``(None, {})`` when ``load_dir`` is None, and, with a warning, when it is a
        folder without a checkpoint. ``missing_ok=True`` is for a script that may start fresh: no warning, and
        the folder need not exist. Collective. Raises CheckpointError on every rank if the folder does not
        exist, or the checkpoint is damaged, incomplete or of another model.
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
        """Write the whole model's weights in the compute dtype to one file. Collective.

        A name that ends in ``.safetensors`` gets that format. The file loads with plain torch; a failure to
        write raises OSError on every rank.
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
        """Move states to host memory until :meth:`reload_states`, so that something else (inference) can have
        the device's memory.

        ``include`` has some of ``optim_states``, ``hp_params`` (the fp32 masters), ``lp_params`` (what the
        model computes with), ``lp_grads`` and ``contiguous_grad_buffer``; None is all of them. At stage 3,
        and in fp32 training, masters and parameters are one memory, which leaves when both are named.
        Further calls move further states.
        A forward pass needs ``lp_params``, a backward pass ``lp_grads`` too, a step or a checkpoint
        everything: each raises OffloadedError until the states are back. Buffers of modules stay.

        With ``non_blocking`` copies to page-locked memory (``pin_memory``) go on behind what comes next; the
        host memory is kept for the next time. Collective, between two passes. Raises OffloadedError where
        the config offloads already, ValueError for other names or devices.
        """
        self._check_alive()
        self._states.move(include, device, pin=bool(pin_memory), non_blocking=bool(non_blocking))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back, to the bit, what :meth:`offload_states` has moved, if anything. With ``non_blocking``
        the host does not wait for the copies; later work on the device does.

        Raises torch.OutOfMemoryError where the device lacks memory; call it again when there is enough.
        """
        self._check_alive()
        self._states.reload(non_blocking=bool(non_blocking))

    # -- ending

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this engine has been destroyed, or its model was given to another engine")

    def destroy(self) -> None:
        """Turn the model back into a plain module with its present values, and release communicators.
        Collective. A second call does nothing.

        The optimizer becomes a plain one and keeps its state where each rank has all of it: at stage 0 and on
        one rank, without offload. Elsewhere its next step raises OptimizerError.
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
