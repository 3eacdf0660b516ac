"""Defines the training loop's three verbs over a sharded model: forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import preemption
from .averaging import Averaging
from .config import Effective
from .data import EngineLoader
from .errors import LossScaleFloorError
from .log import warn
from .optim.sharded_optimizer import ShardedOptimizer
from .precision.buffers import explained as explained_dtypes
from .precision.loss_scaler import DeviceLossScaler, LossScaler, floor_error
from .precision.policy import Precision, cast_floats
from .precision.step_result import StepResult
from .step_losses import StepLosses
from .zero.hooks import ShardedModel
from .zero.output_tensors import tensors_in
from .zero.saved_tensors import explained


class EngineHandles(Protocol):
    """Keeps the script's model and optimizer consistent with one engine."""

    def take_unfrozen(self) -> None:
        """Start to train parameters that have been unfrozen. Collective, where there are any."""

    def check(self) -> None:
        """Raise ParameterError if the model or the optimizer's groups are not what the engine trains."""

    def refuse_unused(self) -> None:
        """Raise ParameterError if a parameter has no gradient of this step on some rank. Collective."""

    def nonfinite_names(self) -> list[str]:
        """Return the names of parameters with inf or NaN in this rank's shard of the gradients."""

    def bring_writes(self) -> None:
        """Copy values written into parameters back to the masters. Raises DiskError."""

    def release(self, *, has_stepped: bool) -> None:
        """Turn the script's optimizer back into a plain one; tell whether the engine has made a step."""

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Add a group of further parameters of the model to those that are trained. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave on this rank."""


class TrainingLoop(nn.Module):
    """Calls a sharded model, collects its gradients and steps its optimizer, scheduler and loss scale."""

    def __init__(
        self,
        sharded: ShardedModel,
        shard_step: ShardedOptimizer | None,
        *,
        lr_scheduler: Any,
        precision: Precision,
        scaler: LossScaler | DeviceLossScaler,
        effective: Effective,
        handles: EngineHandles,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.handles = handles
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: EngineLoader | None = None
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.accumulated = 0
        """Counts the micro-batches since the last optimizer step. It is not `micro_steps` modulo the number
        of a step's micro-batches, which `set_batch` may change.
        """
        self._sharded, self._reducer, self._shard_step = sharded, sharded.reducer, shard_step
        self._precision, self._scaler, self._effective = precision, scaler, effective
        self._skipped_steps = 0
        self._result: StepResult | None = None
        """Keeps the last step's result; on a GPU its numbers are fetched when they are needed."""
        self._unresolved = False
        """Tells that it is not yet known whether the last step was skipped; the scheduler waits for that."""
        self._boundary: bool | None = None
        self._lr_arguments: dict[str, Any] = {}
        self._no_sync = False
        self._counted = 0
        """Counts the backward passes at the last :meth:`step` that only counted."""
        self._has_warned_of_count = False
        self._iteration: int | None = None
        """Keeps the scheduler's count after the last step; None before the first and after a load."""
        self._has_warned_of_schedule = False
        self.last_loss: Tensor | None = None
        """Keeps the last micro-batch's loss."""
        comm = sharded.comm
        self._losses = StepLosses(
            comm.device,
            rank=comm.rank,
            world_size=comm.world_size,
            samples=comm.mesh.samples if comm.mesh.pipeline == 1 else 1,  # a pipeline's is a mean of all
        )
        self.step_observers: list[Callable[[TrainingLoop], None]] = []
        """Are called after every optimizer step."""
        if scaler.used:
            sharded.loss_scaling.factor = lambda: scaler.factor
        sharded.loss_scaling.micro_share = lambda: 1.0 / self.averaging.accumulation
        self._prepare_pass()

    # -- its parts

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer."""
        return self._shard_step.outer if self._shard_step is not None else None

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self._sharded.comm.device

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._sharded.comm.world_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that train on different samples."""
        return self._sharded.comm.mesh.samples

    @property
    def data_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that train on different samples."""
        return self._sharded.comm.mesh.sample_position(self.global_rank)

    @property
    def global_rank(self) -> int:
        """Return this rank's global rank."""
        return self._sharded.comm.rank

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return int(self._effective.config.zero_optimization.stage)

    # -- batches

    def train_batch_size(self) -> int:
        """Return the number of samples in one optimizer step over all ranks."""
        return int(self._effective.config.train_batch_size or 0)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in one micro-batch on one rank."""
        return int(self._effective.config.train_micro_batch_size_per_gpu or 0)

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one optimizer step."""
        return int(self._effective.config.gradient_accumulation_steps or 1)

    @property
    def _is_managed(self) -> bool:
        """Tell whether the engine counts the micro-batches of a step, not the script."""
        return bool(self._effective.config.managed_gradient_accumulation)

    def set_batch(self, train: int, micro: int, accumulation: int) -> None:
        """Change the three batch sizes between two optimizer steps. The loader must yield such batches.

        Raises RuntimeError if the number of micro-batches would change in the middle of a step.
        """
        # a backward pass without its step() is not counted yet
        begun = max(self.accumulated, self._reducer.passes)
        if begun and accumulation != self.gradient_accumulation_steps():
            raise RuntimeError(
                f"gradient_accumulation_steps cannot change from {self.gradient_accumulation_steps()} to "
                f"{accumulation} after {begun} of its micro-batches: change it right after a step"
            )
        names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        sizes = dict(zip(names, (train, micro, accumulation), strict=True))
        config = self._effective.config.model_copy(update=sizes)
        self._effective = replace(self._effective, config=config)
        self._prepare_pass()

    def deepspeed_io(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> EngineLoader:
        """Return a loader of micro-batches over this rank's share of ``dataset``."""
        return EngineLoader(
            dataset,
            batch_size=self.train_micro_batch_size_per_gpu(),
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_size,
            collate_fn=collate_fn,
            drop_last=self._effective.config.dataloader_drop_last,
        )

    @property
    def averaging(self) -> Averaging:
        """Return the factors that losses and gradients are divided by, as of now."""
        return Averaging.of(self._effective.config, self._sharded.comm.mesh)

    # -- the last step

    @property
    def loss_scale(self) -> float:
        """Return the current loss scale; 1.0 except with fp16."""
        return self._scaler.scale

    @property
    def overflow(self) -> bool:
        """Return whether the last step was skipped because gradients were not finite."""
        self._resolve_last_step()
        return self._result is not None and self._result.skipped

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps skipped so far."""
        self._resolve_last_step()
        return self._skipped_steps

    @property
    def should_stop(self) -> bool:
        """Return whether the run should save and stop. Updated by each step, equal on all ranks."""
        preemption.act_on_request()
        return self._result is not None and self._result.stop

    def was_step_applied(self) -> bool:
        """Return whether the last optimizer step changed the parameters."""
        return self.global_steps > 0 and not self.overflow

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's averaged, unscaled gradient before clipping; None before the
        first step.
        """
        return self._result.norm if self._result is not None else None

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        self._resolve_last_step()
        optimizer = self.torch_optimizer
        return [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else []

    def step_metrics(self) -> dict[str, float | Tensor]:
        """Return what is known of the last step: gradient norm, the mean of the losses of all ranks and
        micro-batches, and with fp16 the loss scale and how many steps are known to be skipped; 0-dim tensors
        where a number may still be on its way from the device.
        """
        found = {} if self._result is None else {"grad_norm": self._result.norm_there}
        if self._scaler.used:
            found |= {"loss_scale": self._scaler.factor, "skipped_steps": float(self._skipped_steps)}
        mean = self._losses.mean
        return found if mean is None else {**found, "train_loss": mean}

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters to a checkpoint's numbers, at the beginning of an optimizer step."""
        self._iteration = None
        self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
        self.micro_steps = counters["micro_steps"]
        self.accumulated = 0
        self._skipped_steps = counters["skipped_steps"]
        self._result = None

    # -- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        if self._precision.cast_inputs and self._precision.dtype is not None:
            args, kwargs = cast_floats((args, kwargs), self._precision.dtype)
        if self._shard_step is not None:
            self._shard_step.check()
        try:
            with self._precision.around_forward(self.device):
                return self.module(*args, **kwargs)
        except BaseException as error:
            self._sharded.abandon_forward()
            better = explained(error) or explained_dtypes(
                error, self.module, tensors_in((args, kwargs)), self._precision.dtype
            )
            if better is not None:
                raise better from error
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate one micro-batch's loss; return it."""
        if not loss.requires_grad:
            raise RuntimeError("the loss does not depend on any trainable parameter")
        self._prepare_pass()
        scaled, passes = self._scaled(loss, scale_wrt_gas), self._reducer.passes
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._sharded.loss_scaling.loss_is_scaled = False
        self._note_loss(loss, passes, is_share=not scale_wrt_gas)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale and divided by the number of micro-batches. The
        caller's plain ``.backward()`` on it has to come next.
        """
        self._note_loss(loss, self._reducer.passes)
        return self._scaled(loss, True)

    def _note_loss(self, loss: Tensor, passes: int, *, is_share: bool = False) -> None:
        """Note the loss of a micro-batch before which the step had so many backward passes. Without any,
        gradients of earlier ones have been dropped, and their losses are, too. ``is_share``: the caller has
        divided it by the number of micro-batches, as the Trainer does.
        """
        if not passes:
            self._losses.clear()
        self.last_loss = loss.detach()
        self._losses.note(loss, is_share=is_share)

    def _scaled(self, loss: Tensor, divide: bool) -> Tensor:
        self._sharded.loss_scaling.loss_is_scaled = True
        factor = self._scaler.factor if self._scaler.used else 1.0
        if divide:
            factor = factor / self.averaging.accumulation
        return loss if isinstance(factor, float) and factor == 1.0 else loss * factor

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates the parameters."""
        if not self._is_managed:
            return True
        if self._boundary is not None:
            return self._boundary
        return self.accumulated + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next step is an accumulation boundary, instead of counting micro-batches. Raises
        RuntimeError with ``managed_gradient_accumulation`` false.
        """
        if not self._is_managed:
            raise RuntimeError(
                "managed_gradient_accumulation is false, so every engine.step() is a boundary: do not call "
                "set_gradient_accumulation_boundary()"
            )
        self._boundary = is_boundary
        self._prepare_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context. The next backward pass outside it, or the step,
        reduces them. Raises RuntimeError at stages 2 and 3.
        """
        if self._sharded.options.shard_grads:
            raise RuntimeError(
                f"no_sync needs unsharded gradients, but stage {self.zero_optimization_stage()} shards them: "
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
        transient = self._reducer.options.transient
        # where the script counts, no pass is known to be the last: the step reduces whole gradients
        is_last = self._is_managed and self.is_gradient_accumulation_boundary()
        self._reducer.sync = transient or (is_last and not self._no_sync)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients."""
        self.module.zero_grad(set_to_none)

    # -- step

    def step(self, lr_kwargs: Any = None) -> None:
        """Apply the gradients at the accumulation boundary; else only count."""
        self._lr_arguments = dict(lr_kwargs or {})
        if self.is_gradient_accumulation_boundary():
            self._optimizer_step()
        else:
            self._warn_of_own_count()
            self.accumulated += 1
        self.micro_steps += 1
        self._prepare_pass()

    def _warn_of_own_count(self) -> None:
        """Warn once where several backward passes come before a step() that only counts: the script seems to
        count micro-batches by itself.
        """
        passes = self._reducer.passes
        # fewer than before: a step has been made, or gradients have been dropped
        new = passes - self._counted if passes >= self._counted else passes
        self._counted = passes
        if new > 1 and not self._has_warned_of_count:
            self._has_warned_of_count = True
            if self.global_rank == 0:
                warn(
                    f"engine.step() after {new} backward passes counts as one micro-batch of "
                    f"{self.gradient_accumulation_steps()} (gradient_accumulation_steps): call it after each "
                    "backward pass, or set managed_gradient_accumulation to false if the script counts "
                    "micro-batches"
                )

    def _optimizer_step(self) -> None:
        if self._shard_step is None:
            raise RuntimeError(
                "this engine has no optimizer: pass one to initialize, or add an optimizer section to the "
                "config. At least one parameter must require a gradient"
            )
        if not self._reducer.passes:
            raise RuntimeError(
                "engine.step() without a backward pass since the last step or zero_grad(): call "
                "engine.backward(loss) first. optimizer.step() already calls engine.step(): call only one"
            )
        self._reducer.reduce_rest()
        samples = self.train_batch_size()
        if not self._is_managed:
            samples = samples // self.gradient_accumulation_steps() * self._reducer.passes
        self.handles.check()
        if not self._effective.config.zero_optimization.ignore_unused_parameters:
            self.handles.refuse_unused()
        self._resolve_last_step()
        scaler, divisor = self._scaler, self.gradient_divisor()
        self._sharded.reshard_all()
        broken: list[str] = []
        if isinstance(scaler, LossScaler) and scaler.dynamic and scaler.scale <= scaler.min_scale:
            broken = self.handles.nonfinite_names()
        with torch.no_grad():
            result = self._shard_step.step(
                divisor=divisor,
                clip=float(self._effective.config.gradient_clipping),
                check_finite=self._precision.check_finite,
                beside=self._losses.numbers(),
            )
        self._losses.take(result.beside)
        self._result = result
        self.accumulated = 0  # here: what follows may raise, and the step is made
        self._counted = 0
        self.global_steps += 1
        self.global_samples += samples
        try:
            scaler.update(result)
        except LossScaleFloorError:
            everyone = sorted({name for names in self._sharded.comm.exchange(broken) for name in names})
            raise floor_error(scaler.min_scale, everyone) from None
        result.send(None)
        self._unresolved = self._precision.check_finite
        if not self._precision.check_finite:
            self._advance_schedule()
        elif result.known:
            self._resolve_last_step()
        for observe in self.step_observers:
            observe(self)

    def gradient_divisor(self) -> float | Tensor:
        """Return the divisor of the summed gradients, the loss scale included."""
        return self._scaler.factor * self.averaging.divisor(is_predivided=self._reducer.predivides)

    def _resolve_last_step(self) -> None:
        """Find out whether the last step was skipped, and do what depends on it."""
        if not self._unresolved or self._result is None:
            return
        self._unresolved = False
        if self._result.differs:
            self._sharded.comm.raise_order()
        if not self._result.skipped:
            self._advance_schedule()
            return
        self._skipped_steps += 1
        if self._result.stuck:
            raise floor_error(self._scaler.min_scale)

    def _advance_schedule(self) -> None:
        scheduler = self.lr_scheduler
        if scheduler is None:
            return
        before = _iteration(scheduler)
        if self._iteration is not None and before is not None and before > self._iteration:
            if not self._has_warned_of_schedule and self.global_rank == 0:
                warn(
                    f"the script has stepped the {type(scheduler).__name__} since the last engine.step(), "
                    "which steps it, too: remove scheduler.step() from the script"
                )
            self._has_warned_of_schedule = True
        scheduler.step(**self._lr_arguments)
        self._iteration = _iteration(scheduler)


def _iteration(scheduler: Any) -> int | None:
    """Return how often a scheduler of torch's or ours has stepped; None for one that counts otherwise."""
    count = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return count if isinstance(count, int) else None
