"""The engine: a model under ZeRO with the training loop's three verbs, forward, backward and step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint.engine_part import Saving
from .checkpoint.format.commit import absolute
from .checkpoint.loader import Loader
from .checkpoint.saver import Saver
from .config import Config, Effective
from .data import Batches, EngineLoader
from .errors import LossScaleFloorError
from .handles import Handles
from .memory.estimate import relief
from .offload.engine_part import Moving
from .offload.manager import Offload
from .offload.states import States
from .optim.optimizer_handle import ZeroOptimizer, unguard
from .optim.sharded_optimizer import ShardedOptimizer
from .precision.loss_scaler import DeviceLossScaler, LossScaler, floor_error
from .precision.policy import Precision
from .precision.step_result import StepResult
from .report import report
from .zero.hooks import ShardedModel
from .zero.ownership import GRADIENTS, VALUES
from .zero.reduce import GradientReducer
from .zero.saved_tensors import explained
from .zero.unused_parameters import refuse_unused


class Engine(Batches, Saving, Moving, nn.Module):
    """What :func:`zlaunch.initialize` returns first. Unknown attributes are looked up on the model.

    Attributes
        module: the model that was given, its parameters now in flat units.
        optimizer: the optimizer that was given or made; ``param_groups`` are live, with the model's
            parameters, and its methods lead here.
        lr_scheduler: stepped by :meth:`step`, or None.
        global_steps, skipped_steps, micro_steps, global_samples: counters.
        overflow: whether the last step was skipped because gradients were not finite.
        should_stop: the run has been asked to save and stop (SIGUSR1, a preemption); known after a step,
            the same on all ranks.

    On a GPU, ``overflow``, ``skipped_steps``, ``should_stop``, ``loss_scale`` and the gradient norm are on
    the device until they are asked for, which waits for it; a training loop that does not ask never waits.
    With fp16 the scheduler's step follows at the next of these, or with the next optimizer step.
    """

    optimizer_class: type[ZeroOptimizer] = ZeroOptimizer
    """The base of the class that the optimizer takes on."""

    def __init__(
        self,
        sharded: ShardedModel,
        reducer: GradientReducer,
        shard_step: ShardedOptimizer | None,
        lr_scheduler: Any,
        precision: Precision,
        effective: Effective,
        offload: Offload | None = None,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self._offload = offload
        self._sharded, self._reducer, self._shard_step, self._precision = (
            sharded,
            reducer,
            shard_step,
            precision,
        )
        self._effective = effective
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: EngineLoader | None = None
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._skipped_steps = 0
        self._result: StepResult | None = None
        """Of the last step; on a GPU its numbers are fetched when they are needed."""
        self._unsettled = False
        """Whether the last step was skipped has not been looked at: the scheduler waits for that."""
        self._boundary: bool | None = None
        self._lr_arguments: dict[str, Any] = {}
        self._no_sync = False
        self._loss: Tensor | None = None
        self._reported = time.perf_counter(), 0
        self._scaler: LossScaler | DeviceLossScaler = precision.scaler
        if precision.scaler.dynamic and shard_step is not None and shard_step.decides_on_device:
            self._scaler = DeviceLossScaler(precision.scaler, self.device)
        if self._scaler.used:
            sharded.loss_scale = lambda: self._scaler.factor
        sharded.micro_share = lambda: 1.0 / self.gradient_accumulation_steps()
        self.handles = Handles(sharded, reducer, shard_step, precision.dtype, offload)
        self._states = States(sharded, reducer, shard_step)
        sharded.before_forward = self._before_forward
        section = effective.config.checkpoint
        self._save_dir = absolute(section.save_dir) if section.save_dir else None
        node_local = section.use_node_local_storage
        self._saver = Saver(
            sharded,
            shard_step,
            offload,
            asynchronous=section.is_asynchronous,
            node_local=node_local,
            keep_last=section.keep_last,
            tag_validation=section.tag_validation,
        )
        self._loader = Loader(sharded, shard_step, reducer, node_local=node_local)
        self._destroyed = False
        sharded.engine = self
        self._prepare_pass()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    # -- what it is made of

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given."""
        return self._effective.loaded.raw

    @property
    def effective_config(self) -> Config:
        """The config with every default and "auto" filled in."""
        return self._effective.config

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that was given or made."""
        return self._shard_step.outer if self._shard_step is not None else None

    @property
    def optimizer(self) -> Any:
        """The optimizer that was given or made, an instance of its class and a ZeroOptimizer."""
        return self.torch_optimizer

    @property
    def device(self) -> torch.device:
        return self._sharded.comm.device

    @property
    def world_size(self) -> int:
        return self._sharded.comm.world_size

    @property
    def global_rank(self) -> int:
        return self._sharded.comm.rank

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with at present; 1.0 but for fp16."""
        return self._scaler.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        self._settle()
        return self._result is not None and self._result.skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far."""
        self._settle()
        return self._skipped_steps

    @property
    def should_stop(self) -> bool:
        """The run has been asked to save and stop; known after a step, the same on all ranks."""
        return self._result is not None and self._result.stop

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return int(self._effective.config.zero_optimization.stage)

    # -- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._states.check("a forward pass", VALUES)
        if self._precision.cast_inputs and self._precision.dtype is not None:
            args, kwargs = _cast((args, kwargs), self._precision.dtype)
        if self._shard_step is not None:
            self._shard_step.check()
        self._loader.check()
        try:
            with self._explained("forward"):
                return self.module(*args, **kwargs)
        except RuntimeError as error:
            self._sharded.abandon_forward()
            better = explained(error)
            if better is not None:
                raise better from error
            raise
        except BaseException:
            self._sharded.abandon_forward()
            raise

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        """An out-of-memory error says what would help."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            config = self._effective.config
            advice = relief(
                stage=config.zero_optimization.stage,
                world_size=self.world_size,
                offloads=self._offload is not None,
                micro_batch=self.train_micro_batch_size_per_gpu(),
                checkpoints=config.activation_checkpointing.enabled,
            )
            raise torch.OutOfMemoryError(f"{error}\nzlaunch: out of memory in {where}: {advice}") from error

    def _before_forward(self) -> None:
        self._states.check("a forward pass", VALUES)
        self.handles.take_unfrozen()

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this engine has been destroyed, or its model was given to another engine")

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate one micro-batch's loss (mean over its samples); returns the loss.

        The loss is divided by the number of micro-batches first, so that gradient hooks see a step's mean;
        with ``scale_wrt_gas=False`` the caller has divided already. The ranks' mean is taken by :meth:`step`.
        """
        self._check_alive()
        self._states.check("engine.backward()", VALUES, GRADIENTS)
        if not loss.requires_grad:
            raise RuntimeError("the loss does not depend on any trainable parameter")
        self._prepare_pass()
        scaled = self._scaled(loss, scale_wrt_gas)
        try:
            with self._explained("backward"):
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._sharded.loss_is_scaled = False
        self._loss = loss.detach()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the loss scale and divided by the number of micro-batches, for a plain
        ``.backward()`` of the caller's own, which has to come next.
        """
        return self._scaled(loss, True)

    def _scaled(self, loss: Tensor, divide: bool) -> Tensor:
        self._sharded.loss_is_scaled = True
        factor = self._scaler.factor if self._scaler.used else 1.0
        if divide:
            factor = factor / self.gradient_accumulation_steps()
        return loss if isinstance(factor, float) and factor == 1.0 else loss * factor

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` applies the gradients."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand from now on whether the next step is one."""
        self._boundary = is_boundary
        self._prepare_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally inside the context, at stages 0 and 1. Raises RuntimeError at stages 2 and 3."""
        if self._sharded.options.shard_grads:
            raise RuntimeError(
                f"no_sync needs whole gradients, but stage {self.zero_optimization_stage()} shards them: "
                "use gradient_accumulation_steps"
            )
        self._no_sync = True
        self._prepare_pass()
        try:
            yield
        finally:
            self._no_sync = False
            self._prepare_pass()

    def _prepare_pass(self) -> None:
        transient = self._sharded.options.shard_grads
        self._reducer.sync = transient or (self.is_gradient_accumulation_boundary() and not self._no_sync)

    def step(self, lr_kwargs: Any = None) -> None:
        """At the accumulation boundary: average, unscale, clip, update, and step the scheduler; else only
        count. ``lr_kwargs`` go to the scheduler's step.

        With ``checkpoint.on_signal`` the first step after SIGUSR1 saves and ends the process. Raises
        CheckpointError when a save in the background has failed; LossScaleFloorError, naming parameters, when
        fp16 gradients overflow at the smallest loss scale.
        """
        self._check_alive()
        self._states.check("engine.step()")
        self._loader.check()
        self._lr_arguments = dict(lr_kwargs or {})
        before, is_boundary = self._result, self.is_gradient_accumulation_boundary()
        if is_boundary:
            self._optimizer_step()
        self.micro_steps += 1
        self._prepare_pass()
        if is_boundary:
            self._stop_if_asked(before)
            self._saver.poll()

    def _optimizer_step(self) -> None:
        if self._shard_step is None:
            raise RuntimeError(
                "this engine has no optimizer: give initialize one, or an optimizer section in the config. "
                "None is made where no parameter requires a gradient at that time"
            )
        if not self._reducer.passes:
            raise RuntimeError(
                "engine.step() at an accumulation boundary without a backward pass since the last step or "
                "zero_grad(): it would train nothing. Call engine.backward(loss) first; optimizer.step() is "
                "this step already"
            )
        self.handles.check()
        if not self._effective.config.zero_optimization.ignore_unused_parameters:
            refuse_unused(self._shard_step.units, self._reducer, self._sharded.comm)
        self._settle()
        if self.global_steps:
            self._saver.prepare()
        scaler, divisor = self._scaler, self.gradient_divisor()
        self._sharded.reshard_all()
        broken: list[str] = []
        if isinstance(scaler, LossScaler) and scaler.dynamic and scaler.scale <= scaler.min_scale:
            broken = self._shard_step.nonfinite_names()
        with torch.no_grad():
            result = self._shard_step.step(
                divisor=divisor,
                clip=float(self._effective.config.gradient_clipping),
                check_finite=self._precision.check_finite,
            )
        self._result = result
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        try:
            scaler.update(result)
        except LossScaleFloorError as error:
            everyone = sorted({name for names in self._sharded.comm.exchange(broken) for name in names})
            raise _advised(
                error,
                f"Parameters with such gradients: {', '.join(everyone[:10])}"
                f"{' ...' if len(everyone) > 10 else ''}. ",
            ) from None
        result.send(None)
        self._unsettled = self._precision.check_finite
        if not self._precision.check_finite:
            self._advance_schedule()
        elif result.known:
            self._settle()
        self._report()

    def gradient_divisor(self) -> float | Tensor:
        """What the summed gradients have to be divided by: ranks and loss scale."""
        divisor = self._scaler.factor
        if self._effective.config.gradient_allreduce_op == "mean":
            divisor = divisor * self.world_size
        if self._reducer.options.predivide != 1.0 and self.world_size > 1:
            divisor = divisor / self._reducer.options.predivide
        return divisor

    def _settle(self) -> None:
        """Find out whether the last step was skipped, and do what depends on it."""
        if not self._unsettled or self._result is None:
            return
        self._unsettled = False
        if self._result.differs:
            self._sharded.comm.raise_order()
        if not self._result.skipped:
            self._advance_schedule()
            return
        self._skipped_steps += 1
        if self._result.stuck:
            raise _advised(floor_error(self._scaler.min_scale), "")

    def _advance_schedule(self) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**self._lr_arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        self.module.zero_grad(set_to_none)

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged, unscaled gradient before clipping; None before the first."""
        return self._result.norm if self._result is not None else None

    def get_lr(self) -> list[float]:
        """The present learning rate of each param group."""
        self._settle()
        optimizer = self.torch_optimizer
        return [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else []

    def was_step_applied(self) -> bool:
        """Whether the last optimizer step changed the parameters."""
        return self.global_steps > 0 and not self.overflow

    def _report(self) -> None:
        every = self._effective.config.steps_per_print
        if not every or math.isinf(every) or self.global_steps % int(every):
            return
        now, samples = time.perf_counter(), self.global_samples
        then, before = self._reported
        self._reported = now, samples
        report(
            step=self.global_steps,
            loss=float(self._loss) if self._loss is not None else None,
            lr=next(iter(self.get_lr()), None),
            loss_scale=self._scaler.scale,
            grad_norm=self.get_global_grad_norm(),
            samples_per_s=(samples - before) / max(now - then, 1e-9),
        )

    # -- ending

    def destroy(self) -> None:
        """Give the model back as a plain module with its present values, and release communicators.
        Collective. A second call does nothing.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._sharded.engine = None
        if self._shard_step is not None:
            unguard(self._shard_step.outer)
        with ExitStack() as stack:  # all of it, whatever fails
            stack.callback(self._sharded.comm.close)
            if self._offload is not None:
                stack.callback(self._offload.close)
            stack.callback(self._sharded.close)
            if self._shard_step is not None:
                stack.callback(self._shard_step.finish)
            stack.callback(self._saver.close)
            stack.callback(self._states.close)
            stack.callback(self._states.reload, non_blocking=False)


def _advised(error: LossScaleFloorError, names: str) -> LossScaleFloorError:
    return LossScaleFloorError(
        f"{error}, so the model itself makes inf or NaN. {names}Try bf16, a lower learning rate, or look at "
        "the input data"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
