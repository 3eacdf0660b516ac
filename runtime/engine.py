"""Defines the engine: a model's training loop, its checkpoints, and moving its states off the device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakMethod, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from . import preemption
from .averaging import Averaging
from .batch_watch import BatchWatch
from .comm.collectives import Comm
from .config import Config, Effective
from .data import DataSource, EngineLoader, LoaderOptions, check_data, read_source
from .errors import LossScaleFloorError, OptimizerError, ParameterError
from .garbage import hold_back_collections
from .log import warn
from .missing_step import MissingStep
from .offload.states import StateMover
from .optim.step import ShardedOptimizer, StepMethod
from .precision import DeviceLossScaler, LossScaler, Precision, StepResult, cast_floats, floor_error
from .precision import explained as explained_dtypes
from .step_losses import StepLosses
from .zero import placeholder
from .zero.hooks import ShardedModel
from .zero.placeholder import GRADIENTS, STATES, VALUES, check_on_device
from .zero.saved_tensors import explained
from .zero.tensors import tensors_in
from .zero.unit import Unit

if TYPE_CHECKING:
    from .checkpoint.checkpointer import Checkpointer
    from .script.handles import Handles


# -- engine -----------------------------------------------------------------------------------------


_engines: WeakSet[Engine] = WeakSet()
LossFunction = Callable[..., Tensor | tuple[Tensor, int | Tensor]]
"""Returns the loss of the model's output and labels, with its number of tokens where losses are weighted."""


def engine_of(parameter: Tensor) -> Engine | None:
    """Return the live engine that trains a parameter."""
    unit = placeholder.owner(parameter)
    if unit is None:
        return None
    return next((e for e in _engines if any(unit is own for own in e.units)), None)


class Engine(nn.Module):
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
    - ``client_state``: a function that returns the ``client_state`` for saves without one, such as on a
      signal (``checkpoint.on_signal``), or None.

    On a GPU, reading ``overflow``, ``skipped_steps``, ``should_stop``, ``loss_scale`` or ``grad_norm``
    synchronizes with the device; a training loop that reads none of them never waits. With fp16 the scheduler
    steps at the next such read, or with the next optimizer step.
    """

    optimizer_class: type[Any] | None = None
    """Names the base class for the optimizer, a subclass of ZeroOptimizer; None for ZeroOptimizer."""
    trains_whole_steps = False
    """Tells whether the script calls :meth:`train_batch` for each step, whatever the config says."""
    client_state: Callable[[], Mapping[str, Any]] | None = None
    checkpoints: Checkpointer
    _destroyed = False

    def __init__(
        self,
        sharded: ShardedModel,
        shard_step: ShardedOptimizer | None,
        *,
        lr_scheduler: Any,
        precision: Precision,
        scaler: LossScaler | DeviceLossScaler,
        effective: Effective,
        handles: Handles,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.handles = handles
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: EngineLoader | None = None
        self._loaders: list[EngineLoader] = []
        self._loaders_made = 0
        self.is_batch_size_open = False
        """Lets the first DataLoader decide how many samples a micro-batch has."""
        self._loaded_positions: list[dict[str, Any]] = []
        """Keeps the positions of the last checkpoint that was loaded, for loaders that are made later."""
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.accumulated = 0
        """Counts the micro-batches since the last optimizer step. It is not `micro_steps` modulo the number
        of a step's micro-batches, which `set_batch` may change.
        """
        self._sharded = sharded
        self._reducer = sharded.reducer
        self._shard_step = shard_step
        # A subclass of StepMethod, chosen by `_choose_method` in build.py. Subclasses: offload/step.py,
        # optim/collective.py, optim/one_bit.py and optim/in_backward.py.
        self._method = StepMethod() if shard_step is None else shard_step.method
        self._precision = precision
        self._scaler = scaler
        self._effective = effective
        self.averaging = Averaging.of(effective.config, sharded.comm.mesh)
        """Holds the factors that losses and gradients are divided by."""
        self._skipped_steps = 0
        self._result: StepResult | None = None
        """Keeps the last step's result; on a GPU its numbers are fetched when they are needed."""
        self._unresolved = False
        """Whether the last step's overflow check is still pending on the device. The scheduler steps once it
        is known.
        """
        self._boundary: bool | None = None
        self._lr_arguments: dict[str, Any] = {}
        self._no_sync = False
        self._counted = 0
        """Counts the backward passes at the last :meth:`step` that only counted."""
        self._has_warned_of_count = False
        self._has_warned_of_drops = False
        self._missing_step = MissingStep(is_watched=self._is_managed and sharded.comm.rank == 0)
        finalize(self, self._missing_step.end)
        holds_back = effective.config.disable_python_gc
        self._collect_again = hold_back_collections(self) if holds_back else None
        self._iteration: int | None = None
        """Keeps the scheduler's count after the last step; None before the first and after a load."""
        self._has_warned_of_schedule = False
        self.last_loss: Tensor | None = None
        """Keeps the last micro-batch's loss."""
        comm = sharded.comm
        self._losses = StepLosses(comm.device)
        self._batch_watch = BatchWatch(comm.device, rank=comm.rank, mesh=comm.mesh)
        self.step_observers: list[Callable[[Engine], None]] = []
        """Are called after every optimizer step."""
        if scaler.used:
            sharded.loss_scaling.factor = lambda: scaler.factor
        sharded.loss_scaling.micro_share = self._own_share
        self._schedule = WholeSteps(self)
        self._prepare_pass()

    def attach(
        self,
        *,
        checkpoints: Checkpointer,
        states: StateMover,
        offload: Any,
        monitor: Any,
        around: Callable[..., AbstractContextManager[None]],
        schedule: Callable[[Engine], WholeSteps] | None,
        router: Any,
    ) -> None:
        """Take the parts that the assembly has built for this engine; called once, before anything else.

        ``offload`` keeps states off the device, None where all stay there; ``monitor`` has ``write_events``;
        ``around`` gives a context for each ``"forward"`` (with the model's arguments, a tuple and a dict),
        ``"backward"`` and ``"step"``; ``schedule`` makes the object that trains whole steps, None for the
        plain one; ``router`` is the :class:`~.observe.router.RouterStatistics`, or None.
        """
        self.checkpoints = checkpoints
        self._states = states
        self._offload = offload
        self.monitor = monitor
        self._around = around
        self._router = router
        if schedule is not None:
            self._schedule = schedule(self)
        if self._shard_step is not None:
            self._method.connect(
                self._shard_step, WeakMethod(self.gradient_divisor), WeakMethod(self.get_global_grad_norm)
            )
        self._sharded.before_forward = self._before_forward
        self._sharded.engine = self
        _engines.add(self)

    if not TYPE_CHECKING:  # a type checker shall find a misspelled method

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "module":
                    raise
            module = super().__getattr__("module")
            try:
                return getattr(module, name)
            except AttributeError as error:
                if getattr(error, "name", name) != name:  # it comes from inside a property of the model
                    raise
                similar = get_close_matches(name, dir(type(self)), n=1)
                advice = f". Did you mean {similar[0]!r}?" if similar else ""
                raise AttributeError(
                    f"neither {type(self).__name__!r} nor its {type(module).__name__!r} has an attribute "
                    f"{name!r}{advice}",
                    name=name,
                    obj=self,
                ) from None

    # -- its parts

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer."""
        return self._shard_step.outer if self._shard_step is not None else None

    @property
    def units(self) -> list[Unit]:
        """Return the units: flat buffers of parameters that are gathered, reduced and stepped together."""
        return self._sharded.units

    @property
    def comm(self) -> Comm:
        """Return the communicator. Its ``moved`` counts the elements sent by each kind of collective."""
        return self._sharded.comm

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self.comm.device

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.comm.world_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that train on different samples."""
        return self.comm.mesh.samples

    @property
    def data_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that train on different samples."""
        return self.comm.mesh.sample_position(self.global_rank)

    @property
    def global_rank(self) -> int:
        """Return this rank's global rank."""
        return self.comm.rank

    @property
    def zero_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return int(self._effective.config.zero_optimization.stage)

    def zero_optimization_stage(self) -> int:
        """Return :attr:`zero_stage`: DeepSpeed's name."""
        return self.zero_stage

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

    # -- batches

    @property
    def micro_batch_size(self) -> int:
        """Return the number of samples in one micro-batch on one rank; 1 with a preset until the first loader
        says it.
        """
        return int(self._effective.config.train_micro_batch_size_per_gpu or 0)

    @property
    def accumulation_steps(self) -> int:
        """Return the number of micro-batches in one optimizer step."""
        return int(self._effective.config.gradient_accumulation_steps or 1)

    @property
    def global_batch_size(self) -> int:
        """Return the number of samples in one optimizer step over all ranks."""
        return int(self._effective.config.train_batch_size or 0)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return :attr:`micro_batch_size`: DeepSpeed's name."""
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return :attr:`accumulation_steps`: DeepSpeed's name."""
        return self.accumulation_steps

    def train_batch_size(self) -> int:
        """Return :attr:`global_batch_size`: DeepSpeed's name."""
        return self.global_batch_size

    @property
    def _is_managed(self) -> bool:
        """Tell whether the engine counts the micro-batches of a step, not the script."""
        return bool(self._effective.config.managed_gradient_accumulation)

    @property
    def unstepped_micro_batches(self) -> int:
        """Return the number of micro-batches whose gradients wait for an optimizer step."""
        # the passes since the last step() are not counted yet; a script that counts by itself has no others
        return max(self.accumulated, self._reducer.passes)

    def set_batch(self, train: int, micro: int, accumulation: int) -> None:
        """Change the three batch sizes between two optimizer steps. The loader must yield such batches.

        Raises RuntimeError if the number of micro-batches would change in the middle of a step,
        OptimizerError for several micro-batches where the backward pass makes the step.
        """
        self._method.check_accumulation(accumulation)
        begun = self.unstepped_micro_batches
        if begun and accumulation != self.gradient_accumulation_steps():
            raise RuntimeError(
                f"gradient_accumulation_steps cannot change from {self.gradient_accumulation_steps()} to "
                f"{accumulation} after {begun} of its micro-batches: change it right after a step"
            )
        names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        sizes = dict(zip(names, (train, micro, accumulation), strict=True))
        config = self._effective.config.model_copy(update=sizes)
        self._effective = replace(self._effective, config=config)
        self.averaging = Averaging.of(config, self.comm.mesh)
        self._prepare_pass()

    def take_batch_size_of_loader(self) -> None:
        """Take the size of micro-batches from the first DataLoader that :meth:`dataloader` is given."""
        self.is_batch_size_open = True

    def how_to_accumulate(self, count: int) -> str:
        """Return advice on how to train ``count`` micro-batches per step, for a message."""
        if self._is_managed:
            return f"set gradient_accumulation_steps to {count}"
        return f"call the optimizer's step after {count} micro-batches, with losses divided by {count}"

    def _settle_batch_size(self, batch_size: int | None, loader: bool) -> None:
        """Take the batch size of a training loader, if it is still open. Raises ParameterError where neither
        the config nor the call says it.
        """
        if not self.is_batch_size_open:
            return
        if batch_size is None:
            if loader:
                return  # a batch sampler decides, batch by batch
            raise ParameterError(
                "engine.dataloader: how many samples has a batch on one rank? Pass batch_size here, or to "
                "zlaunch.prepare"
            )
        self.is_batch_size_open = False
        accumulation = self.gradient_accumulation_steps()
        self.set_batch(batch_size * accumulation * self.data_parallel_size, batch_size, accumulation)

    def _warn_of_other_batch_size(self, batch_size: int | None) -> None:
        micro = self.train_micro_batch_size_per_gpu()
        if batch_size not in (None, micro) and not self.is_batch_size_open and self.global_rank == 0:
            warn(
                f"the DataLoader's batch_size is {batch_size}, but samples are counted by the config's "
                f"train_micro_batch_size_per_gpu, {micro}: make them equal"
            )

    def dataloader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        training: bool = True,
    ) -> EngineLoader:
        """Return a loader of this rank's share of a data set, or of what a DataLoader reads.

        Each sample comes once per epoch on one data-parallel rank; ranks of a tensor or sequence group read
        the same. The section ``data_loader`` of the config says how; a DataLoader keeps its own options, its
        sampler and its batch size. Checkpoints store the position, also for another number of ranks.

        Args:
            data: A data set with ``__len__`` and ``__getitem__``, an IterableDataset, or a DataLoader that
                reads all samples, in the same order, on every rank. Its shuffle follows from the seed of its
                generator or DistributedSampler, otherwise from ``data_loader.seed``, and from the epoch.
            batch_size: Samples of a batch on one rank; default: ``train_micro_batch_size_per_gpu``.
            shuffle: Whether each epoch has a new order; default: ``data_loader.shuffle``, and False without
                ``training``.
            collate_fn: Makes a batch of samples, as torch's DataLoader calls it.
            num_workers: Processes that read samples; default: ``data_loader.num_workers``.
            training: False for validation: in order, with all samples (``dataloader_drop_last``, DeepSpeed's
                key, holds here too), and checkpoints do not store the position.

        Raises ParameterError for a loader or sampler that shares out the samples itself, and in the first
        batches of an epoch in which ranks read different orders. A warning says so if an epoch has fewer
        micro-batches than a step, which then ends in a later epoch.
        """
        check_data(data, batch_size, shuffle, num_workers)
        self._loaders_made += 1
        if isinstance(data, DataLoader):
            given = {
                "batch_size": batch_size,
                "shuffle": shuffle,
                "collate_fn": collate_fn,
                "num_workers": num_workers,
            }
            if refused := [key for key, value in given.items() if value is not None]:
                raise ParameterError(
                    f"engine.dataloader: a DataLoader has its own {', '.join(refused)}: leave the argument "
                    "out, or pass the data set"
                )
            source = read_source(data, rank=self.data_parallel_rank, ranks=self.data_parallel_size)
            if training:
                self._settle_batch_size(source.batch_size, loader=True)
                self._warn_of_other_batch_size(source.batch_size)
        else:
            self._settle_batch_size(batch_size, loader=False)
            source = self._source(data, batch_size, shuffle, collate_fn, num_workers, training)
        section = self._effective.config.data_loader
        loader = EngineLoader(
            source.dataset,
            batch_size=source.batch_size,
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_size,
            collate_fn=source.collate_fn,
            drop_last=source.drop_last,
            shuffle=source.shuffle,
            seed=section.seed if source.seed is None else source.seed,
            sampler=source.sampler,
            batch_sampler=source.batch_sampler,
            options=source.options,
            name=f"data loader {self._loaders_made} ({type(source.dataset).__name__})",
            key=f"{self.comm.number}/{self._loaders_made}",
            clock=partial(_trained, ref(self)) if training else None,
        )
        if training:
            self._add_loader(loader)
        return loader

    def _source(
        self,
        data: Dataset[Any],
        batch_size: int | None,
        shuffle: bool | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int | None,
        training: bool,
    ) -> DataSource:
        """Return what a loader of a data set reads, by the config."""
        config = self._effective.config
        section = config.data_loader
        on_gpu = self.device.type == "cuda"
        options = LoaderOptions(
            num_workers=section.num_workers if num_workers is None else num_workers,
            pin_memory=on_gpu if section.pin_memory is None else section.pin_memory,
            prefetch_factor=section.prefetch_factor,
            persistent_workers=section.persistent_workers,
        )
        if not options.num_workers and self.global_rank == 0:
            for name in ("prefetch_factor", "persistent_workers"):
                if f"data_loader.{name}" in self._effective.loaded.given and getattr(section, name):
                    warn(f"data_loader.{name} has no effect without workers: set data_loader.num_workers")
        return DataSource(
            dataset=data,
            batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            shuffle=training and section.shuffle if shuffle is None else shuffle,
            drop_last=(training and section.drop_last) or config.dataloader_drop_last,
            collate_fn=collate_fn,
            options=options,
        )

    def _add_loader(self, loader: EngineLoader) -> None:
        """Have checkpoints store a loader's position; set it if a checkpoint was loaded before."""
        index = len(self._loaders)
        if any(loader.dataset is other.dataset for other in self._loaders) and self.global_rank == 0:
            warn(
                f"engine.dataloader was called again for the same {type(loader.dataset).__name__}: a new "
                "loader begins with the order of the first epoch. Make it once, before the loop over epochs"
            )
        self._loaders.append(loader)
        if index < len(self._loaded_positions):
            loader.load_state_dict(self._loaded_positions[index])
        if self.training_dataloader is None:
            self.training_dataloader = loader
        needed = self.gradient_accumulation_steps()
        has_length = loader.batches_left is not None
        if has_length and len(loader) < needed and self.global_rank == 0:
            warn(
                f"{loader.name}: a rank gets {len(loader)} micro-batches per epoch, but a step needs "
                f"{needed}: an epoch may end without an optimizer step. Reduce train_batch_size"
            )

    def data_positions(self) -> list[dict[str, Any]]:
        """Return the positions of the training loaders, in the order in which they were made.

        A loader that this script makes later has the position of the checkpoint that was loaded.
        """
        own = [loader.state_dict() for loader in self._loaders]
        return [*own, *self._loaded_positions[len(own) :]]

    def batch_history(self) -> dict[str, Any] | None:
        """Return what identifies the batches of the last steps, for checkpoints; None before the first step.
        Waits for numbers that are on their way from the device.
        """
        return self._batch_watch.state()

    def load_data_positions(self, positions: Sequence[Mapping[str, Any]]) -> None:
        """Set the positions of the training loaders, also of those that are made later."""
        self._loaded_positions = [dict(position) for position in positions]
        for loader, position in zip(self._loaders, positions, strict=False):
            loader.load_state_dict(position)

    def deepspeed_io(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> EngineLoader:
        """Return a loader of micro-batches over this rank's share of ``dataset``: DeepSpeed's name for
        :meth:`dataloader`.
        """
        return self.dataloader(dataset, collate_fn=collate_fn)

    def gather_for_metrics(self, values: Any, loader: EngineLoader | None = None) -> Any:
        """Return tensors of all data-parallel ranks, joined along their first dimension. Collective.

        Args:
            values: A tensor with one row for each sample, or tuples, lists and dicts of them, and None.
                Without a ``loader``, a tensor without dimensions, such as a loss, is one row.
            loader: The loader of the samples. Pass the rows of its last batch before it yields the next one,
                or the rows of all batches after the loop. The result has the loader's order and leaves out
                samples that the loader repeats because they do not divide evenly among the ranks. Without a
                loader, the rows have the order of the ranks.

        Returns:
            The same structure on every rank, with detached tensors on the device.

        Raises ParameterError where ranks have other structures, dtypes or shapes (except for the first
        dimension without a ``loader``), for other numbers of rows than the loader's, and where the loader
        does not know which samples are repeated.
        """
        self._check_alive()
        if loader is not None and not isinstance(loader, EngineLoader):
            raise TypeError(
                f"gather_for_metrics: loader is a {type(loader).__name__}, expected what engine.dataloader "
                "has returned"
            )
        found, structure = tree_flatten(values)
        kept = self._check_metrics(found, str(structure), loader)
        joined: list[Tensor | None] = []
        for each in found:
            if each is None:
                joined.append(None)
                continue
            own = each.detach().to(self.device)
            joined.append(self._gathered_rows(own.reshape(1) if own.dim() == 0 else own, kept))
        return tree_unflatten(joined, structure)

    def _check_metrics(self, values: list[Any], structure: str, loader: EngineLoader | None) -> int | None:
        """Return how many rows of all ranks are kept, None for all. Raises ParameterError on every rank for
        what cannot be gathered on some rank. Collective.
        """
        problem = None
        place: tuple[int, int] | None = None
        has_loader = loader is not None
        kinds: list[tuple[Any, ...] | None] = []
        for each in values:
            if each is None:
                kinds.append(None)
            elif not isinstance(each, Tensor) or each.layout != torch.strided:
                kind = each.layout if isinstance(each, Tensor) else type(each).__name__
                problem = f"expected dense tensors, got {kind}"
            elif each.dim() == 0 and has_loader:
                problem = "a tensor without dimensions has no rows: gather it without the loader"
            else:
                # with a loader, all ranks have as many rows
                kinds.append((tuple(each.shape if has_loader else each.shape[1:]), each.dtype))
        if loader is not None and problem is None:
            try:
                places = {loader.place_of_rows(len(each)) for each in values if each is not None}
                place = places.pop() if places else None  # of any number of rows there is one place
            except ParameterError as error:
                problem = str(error)
        mine = (problem, has_loader, structure, kinds, place)
        everyone = self.comm.exchange(mine)
        if len({other[1] for other in everyone}) > 1:
            raise ParameterError("gather_for_metrics: pass the loader on all ranks or on none")
        for rank, other in enumerate(everyone):
            said = None
            if other[0] is not None:
                said = f"on rank {rank}: {other[0]}"
            elif other[2] != structure:
                said = f"rank {rank} has other tuples, lists or dict keys than rank {self.global_rank}"
            elif other[3] != kinds:
                me = self.global_rank
                said = f"rank {rank} has other shapes or dtypes ({other[3]}) than rank {me} ({kinds})"
            elif other[4] != place:
                said = f"rank {rank} has another batch of the loader than rank {self.global_rank}"
            if said is not None:
                raise ParameterError(f"gather_for_metrics: {said}")
        return None if place is None else place[1]

    def _gathered_rows(self, rows: Tensor, kept: int | None) -> Tensor:
        """Return the rows of all data-parallel ranks: in the order of the ranks, or the first ``kept`` in the
        order of a loader, which deals samples out to the ranks in turn.
        """
        everyone = self.comm.gather_tensors(rows, "gathers values for metrics")
        mesh = self.comm.mesh
        # ranks of a tensor or sequence group have the same samples: the first of them counts
        first = {mesh.sample_position(rank): each for rank, each in reversed(list(enumerate(everyone)))}
        parts = [first[position] for position in range(mesh.samples)]
        return torch.cat(parts) if kept is None else torch.stack(parts, dim=1).flatten(0, 1)[:kept]

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

    @property
    def grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's averaged, unscaled gradient before clipping; None before the
        first step.
        """
        return self._result.norm if self._result is not None else None

    def get_global_grad_norm(self) -> float | None:
        """Return :attr:`grad_norm`: DeepSpeed's name."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group. Raises OptimizerError for an optimizer that
        computes its own.
        """
        self._resolve_last_step()
        optimizer = self.torch_optimizer
        rates = [group["lr"] for group in optimizer.param_groups] if optimizer is not None else []
        if None in rates:
            raise OptimizerError(
                f"{type(optimizer).__name__} computes its own learning rate: its param groups have lr None"
            )
        return [float(rate) for rate in rates]

    def step_metrics(self) -> dict[str, float | Tensor]:
        """Return what is known of the last step: gradient norm, the mean of the losses of all ranks and
        micro-batches, the load of experts, and with fp16 the loss scale and how many steps are known to be
        skipped; 0-dim tensors where a number may still be on its way from the device.
        """
        found = {} if self._router is None else dict(self._router.metrics())
        if self._result is not None:
            found["grad_norm"] = self._result.norm_there
        if self._scaler.used:
            found |= {"loss_scale": self._scaler.factor, "skipped_steps": float(self._skipped_steps)}
        mean = self._losses.mean
        return found if mean is None else {**found, "train_loss": mean}

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counters to a checkpoint's numbers, at the beginning of an optimizer step."""
        self._iteration = None
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.micro_steps = counters["micro_steps"]
        self.accumulated = 0
        self._skipped_steps = counters["skipped_steps"]
        self._result = None
        self._method.restore_counters(counters)
        self._batch_watch.load_state(counters.get("batches"))

    # -- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass. Raises ParameterError where ranks have different layers."""
        self._schedule.check_call("engine(...)")
        self.checkpoints.check()
        with self._around("forward", args, kwargs):
            if self._precision.cast_inputs and self._precision.dtype is not None:
                args, kwargs = cast_floats((args, kwargs), self._precision.dtype)
            if self._shard_step is not None:
                self._shard_step.check()
            if self.module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._batch_watch.note((args, kwargs))
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

    def _before_forward(self) -> None:
        """Run before each forward pass of the model, also of one that the script calls without the engine."""
        self._method.before_forward()
        self._check_states("a forward pass", VALUES)
        self.handles.take_unfrozen()

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        num_tokens: int | Tensor | None = None,
    ) -> Tensor:
        """Back-propagate the loss of one micro-batch and return the loss.

        Divides the loss, a mean over the samples, by the number of micro-batches in a step first; pass
        ``scale_wrt_gas=False`` if the script has divided it. :meth:`step` averages gradients over the ranks.

        With ``loss_reduction`` "tokens" in the config, the loss is a mean over ``num_tokens`` tokens, and
        each token of all micro-batches and ranks counts the same. Call it once for each micro-batch, with
        the sum of its losses. A tensor with one whole number may be on any device. Ranks of a sequence group
        pass the number of whole sequences. A loss of no tokens (0) counts as nothing, even if it is NaN,
        unless the model itself divides by 0.

        Raises TypeError for a loss or a number of tokens of another type, RuntimeError for a loss that is not
        a single number or depends on no parameter, ParameterError for ``num_tokens`` without
        ``loss_reduction`` "tokens", or the other way round.
        """
        self._schedule.check_call("engine.backward()")
        _check_loss(loss)
        tokens = self._checked_tokens(num_tokens, "call engine.backward(loss, num_tokens=...)")
        if tokens is not None and not scale_wrt_gas:
            raise ParameterError(
                'scale_wrt_gas=False: with loss_reduction "tokens" the engine divides by the tokens of all '
                "micro-batches, so pass a loss that the script has not divided"
            )
        self._guard("engine.backward()", VALUES, GRADIENTS)
        self._method.before_backward(retain_graph=retain_graph)
        with self._around("backward"):
            if not loss.requires_grad:
                raise RuntimeError("the loss does not depend on any trainable parameter")
            self._prepare_pass()
            if tokens is not None:
                loss = without_empty(loss, tokens)
            scaled = self._scaled(loss, divide=scale_wrt_gas, tokens=tokens)
            passes = self._reducer.passes
            try:
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            finally:
                self._sharded.loss_scaling.end()
            self._note_loss(loss, passes, is_share=not scale_wrt_gas, tokens=tokens)
            if self._missing_step.is_watched:
                self._missing_step.note_backward(self.gradient_accumulation_steps(), is_first=not passes)
            return loss

    def scale(self, loss: Tensor, *, num_tokens: int | Tensor | None = None) -> Tensor:
        """Return the loss multiplied by the loss scale and divided by the number of micro-batches, or
        weighted by ``num_tokens`` as in :meth:`backward`. The caller's plain ``.backward()`` on it has to
        come next.
        """
        tokens = self._checked_tokens(num_tokens, "call engine.scale(loss, num_tokens=...)")
        if tokens is not None:
            if self._sharded.loss_scaling.loss_is_scaled:
                raise ParameterError(
                    "engine.scale() again before the backward pass of the loss that it has scaled: with "
                    'loss_reduction "tokens", add the losses of a micro-batch first and scale their sum'
                )
            loss = without_empty(loss, tokens)
        self._note_loss(loss, self._reducer.passes, tokens=tokens)
        return self._scaled(loss, divide=True, tokens=tokens)

    def _checked_tokens(self, tokens: int | Tensor | None, advice: str) -> int | Tensor | None:
        """Return a number of tokens, a tensor on the device; None where losses are not weighted. Raises
        ParameterError with ``advice`` where the number is missing, and where the config does not use it;
        TypeError or ValueError for what is no number of tokens.
        """
        by_tokens = self._effective.config.loss_reduction == "tokens"
        if tokens is None:
            if by_tokens:
                raise ParameterError(
                    f'loss_reduction is "tokens": {advice} with the number of tokens that the loss is a mean '
                    "of, such as (labels != -100).sum()"
                )
            return None
        if not by_tokens:
            raise ParameterError(
                'num_tokens has no effect: set "loss_reduction": "tokens" in the config, or leave it out'
            )
        return _whole_number(tokens, self.device)

    def _own_share(self) -> float:
        """Return a micro-batch's part of a step for a backward pass that the script starts by itself. Raises
        ParameterError where that depends on its number of tokens.
        """
        if self._effective.config.loss_reduction == "tokens":
            raise ParameterError(
                'loss_reduction is "tokens": call engine.backward(loss, num_tokens=...) instead of '
                "loss.backward()"
            )
        return 1.0 / self.averaging.accumulation

    def _note_loss(
        self, loss: Tensor, passes: int, *, is_share: bool = False, tokens: int | Tensor | None = None
    ) -> None:
        """Note the loss of a micro-batch before which the step had so many backward passes. Without any,
        gradients of earlier ones have been dropped, and their losses are, too. ``is_share``: the caller has
        divided it by the number of micro-batches, as the Trainer does.
        """
        if not passes:
            self._losses.clear()
        self.last_loss = loss.detach()
        self._losses.note(loss, is_share=is_share, tokens=tokens)

    def _scaled(self, loss: Tensor, *, divide: bool, tokens: int | Tensor | None = None) -> Tensor:
        """Return the loss that a backward pass starts from."""
        self._sharded.loss_scaling.expect_scaled(tokens)
        factor = self._scaler.factor if self._scaler.used else 1.0
        if divide:
            factor = self.averaging.share(factor, tokens)
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
        RuntimeError with ``managed_gradient_accumulation`` false, OptimizerError for False where the backward
        pass makes the step.
        """
        if not is_boundary:
            self._method.check_accumulation("several")
        if not self._is_managed:
            raise RuntimeError(
                "managed_gradient_accumulation is false, so every engine.step() is a boundary: do not call "
                "set_gradient_accumulation_boundary()"
            )
        self._boundary = is_boundary
        self._missing_step.trust()
        self._prepare_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context. The next backward pass outside it, or the step,
        reduces them. Raises RuntimeError at stages 2 and 3.
        """
        if self._sharded.options.shard_grads:
            raise RuntimeError(
                f"no_sync needs unsharded gradients, but stage {self.zero_optimization_stage()} shards them: "
                "leave it out. gradient_accumulation_steps accumulates, too"
            )
        outer = self._no_sync
        self._no_sync = True
        self._missing_step.trust()
        self._prepare_pass()
        try:
            yield
        finally:
            self._no_sync = outer
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
        """Update the parameters and step the scheduler at the accumulation boundary; else only count.

        The update averages, unscales and clips the gradients. ``lr_kwargs`` go to the scheduler's step. With
        ``checkpoint.on_signal``, the first step after SIGUSR1 saves and ends the process.

        Raises:
            CheckpointError: a background save failed.
            LossScaleFloorError: fp16 gradients overflow at the minimum loss scale; names the parameters.
        """
        self._schedule.check_call("engine.step()")
        self._guard("engine.step()")
        self.checkpoints.check()
        self._missing_step.trust()
        self._method.before_step()
        before = self._result
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary and self.global_steps:
            self.checkpoints.prepare()
        with self._around("step"):
            self._lr_arguments = dict(lr_kwargs or {})
            if is_boundary:
                self._optimizer_step()
            else:
                self._warn_of_own_count()
                self.accumulated += 1
            self.micro_steps += 1
            self._prepare_pass()
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

    def _warn_of_dropped_gradients(self) -> None:
        """Warn once where a step lacks the gradients of micro-batches that step() has counted."""
        passes = self._reducer.passes
        are_missing = self._reducer.dropped and self.accumulated > 0 and passes <= self.accumulated
        if not are_missing or self._has_warned_of_drops:
            return
        self._has_warned_of_drops = True
        if self.global_rank == 0:
            warn(
                f"engine.step() after {self.accumulated + 1} micro-batches has the gradients of {passes}: "
                "zero_grad() between them dropped the others. Delete it: the step clears gradients"
            )

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
                    "backward pass. If the script itself counts micro-batches and divides the loss, set "
                    "managed_gradient_accumulation to false and gradient_accumulation_steps to 1"
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
                "engine.backward(loss) or loss.backward() first. optimizer.step() already calls "
                "engine.step(): call only one"
            )
        self._warn_of_dropped_gradients()
        self._reducer.reduce_rest()
        samples = self.train_batch_size()
        if not self._is_managed:
            samples = samples // self.gradient_accumulation_steps() * self._reducer.passes
        self.handles.check()
        if not self._effective.config.zero_optimization.ignore_unused_parameters:
            self.handles.refuse_unused()
        self._resolve_last_step()
        scaler = self._scaler
        self._sharded.reshard_all()
        broken: list[str] = []
        if isinstance(scaler, LossScaler) and scaler.dynamic and scaler.scale <= scaler.min_scale:
            broken = self.handles.nonfinite_names()
        with torch.no_grad():
            result = self._shard_step.step(
                divisor=self._divisor_of_step,
                clip=float(self._effective.config.gradient_clipping),
                check_finite=self._precision.check_finite,
                extra_stats=torch.cat([self._losses.numbers(), self._batch_watch.numbers()]),
            )
        self._losses.take(result.extra_stats)
        self._batch_watch.take(
            result.extra_stats[StepLosses.COUNT :],
            self.global_steps + 1,
            is_shared_out=any(loader.taken for loader in self._loaders),
        )
        self._result = result
        self.accumulated = 0  # here: what follows may raise, and the step is made
        self._counted = 0
        self.global_steps += 1
        self.global_samples += samples
        try:
            scaler.update(result)
        except LossScaleFloorError:
            everyone = sorted({name for names in self.comm.exchange(broken) for name in names})
            raise floor_error(scaler.min_scale, everyone) from None
        result.send(None)
        self._unresolved = self._precision.check_finite
        if not self._precision.check_finite:
            self._advance_schedule()
        elif result.known:
            self._resolve_last_step()
        if self._router is not None:
            self._router.after_step()
        for observe in self.step_observers:
            observe(self)

    def gradient_divisor(self) -> float | Tensor:
        """Return the divisor of the summed gradients, the loss scale included. Raises ParameterError where it
        depends on the tokens of all ranks, which are summed in the step.
        """
        if self._effective.config.loss_reduction == "tokens":
            raise ParameterError(
                'loss_reduction is "tokens": before engine.step() has summed the tokens of all ranks, no '
                "average gradient can be read or set"
            )
        return self._divisor_of_step(())

    def _divisor_of_step(self, sums: Sequence[float] | Tensor) -> float | Tensor:
        """Return the divisor of the summed gradients; ``sums`` over the ranks are of :class:`StepLosses`."""
        averaging = self.averaging
        tokens = StepLosses.total_weight(sums) if averaging.by_tokens else 0.0
        divisor = averaging.divisor(is_predivided=self._reducer.predivides, tokens=tokens)
        if isinstance(divisor, Tensor):
            divisor = divisor.float()  # as the kernels take it; up to 2^24 tokens it is exact
        return self._scaler.factor * divisor

    def _resolve_last_step(self) -> None:
        """Find out whether the last step was skipped, and do what depends on it."""
        if not self._unresolved or self._result is None:
            return
        self._unresolved = False
        if self._result.differs:
            self.comm.raise_order()
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
        if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in self._lr_arguments:
            raise RuntimeError(
                'ReduceLROnPlateau needs a metric: call engine.step(lr_kwargs={"metrics": loss}), or leave '
                "lr_scheduler out and step the scheduler in the script"
            )
        scheduler.step(**self._lr_arguments)
        self._iteration = _iteration(scheduler)

    # -- whole steps

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None
    ) -> Tensor:
        """Train one step on ``gradient_accumulation_steps`` micro-batches of ``data_iter``, by default of the
        training_data; return the mean loss over all ranks and micro-batches. Collective.

        One is a dict of the model's arguments (a Hugging Face model, whose output has the loss), or a pair of
        inputs and labels, for which ``loss_fn(output, labels)`` computes the loss. With ``loss_reduction``
        "tokens", ``loss_fn`` returns ``(loss, num_tokens)``, or the dict has ``num_tokens``, which the model
        is not given. With pipeline parallelism, all ranks pass the same micro-batches.

        Raises StopIteration at the end of the data, ParameterError for a micro-batch or a model that does not
        fit.
        """
        return self._schedule.train(data_iter, loss_fn)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        loss_fn: LossFunction | None = None,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of so many micro-batches, by default as many as a step has, without training.
        Collective.
        """
        return self._schedule.evaluate(data_iter, loss_fn, num_micro_batches)

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
                Saved per rank if ranks differ. None is what :attr:`client_state` returns, if that is set.
            save_latest: Load this checkpoint by default, without a tag.
            exclude_frozen_parameters: Leave out frozen parameters.

        Raises CheckpointError on every rank; the previous checkpoint is then unchanged. Raises ValueError if
        ``save_dir`` is empty or None.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}: name a folder")
        self._prepare_save()
        if client_state is None and self.client_state is not None:
            client_state = self.client_state()
        self.checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def _prepare_save(self) -> None:
        self._guard("engine.save_checkpoint()")
        self._method.before_save()
        self._resolve_last_step()
        self.checkpoints.check()
        self.handles.check()
        self.handles.sync_to_masters()
        self._sync_replicas("engine.save_checkpoint()")

    def _sync_replicas(self, call: str, *, keeps_writes: bool = True) -> None:
        """Give all ranks the same weights and moments for a ``call``, if their optimizer lets each make steps
        of its own (0/1 Adam). Collective. Raises OptimizerError where ``keeps_writes`` and the script has
        changed them meanwhile, OffloadedError where states are offloaded.
        """
        if self._shard_step is None or not self._method.replicas_diverged:
            return
        self._guard(call)
        self._resolve_last_step()
        if keeps_writes:
            self.handles.check()
            self.handles.sync_to_masters()
        self._shard_step.sync_replicas(keeps_writes=keeps_writes)

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
        self._schedule.restart_data()
        # What the checkpoint lacks is kept.
        self._sync_replicas("engine.load_checkpoint()", keeps_writes=False)
        self._method.begin_load()
        path = None
        try:
            self._guard("engine.load_checkpoint()")
            self.handles.take_unfrozen()
            self._resolve_last_step()
            path, client_state = self.checkpoints.load(
                load_dir,
                tag,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_schedule=load_lr_scheduler_states and not load_module_only,
                with_run=not load_module_only,
                missing_ok=missing_ok,
            )
        finally:
            self._method.end_load(has_loaded=path is not None)
        return path, client_state

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
        self._guard("engine.save_16bit_model()", VALUES)
        self._method.before_save()
        self._sync_replicas("engine.save_16bit_model()")
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

    # -- guards against misuse
    #
    # Note [Guards]. A use that would train wrong values or hang is refused where it is cheapest to see. None
    # of these waits for a device, and none costs more the more elements a model has:
    #   a call of the engine: the engine lives, no load was left half-way, the states are on the device
    #       (_guard, Checkpointer.check), the schedule allows the call (check_call).
    #   a forward pass: parameters that were unfrozen have an optimizer group (Handles.take_unfrozen).
    #   a step: modules, parameters and groups are those that were given (Handles.check: identities). All
    #       ranks used the same layers in the same order, and ranks that share a batch had the same one
    #       (Comm.differs): a few numbers more in the sum that every step makes.
    #   a gather and a reshard of a unit: nothing was written that would be lost (Writes.find_lost: versions).
    #   a use of a sharded parameter outside of a pass: its class refuses it (zero/placeholder.py).

    def _guard(self, call: str, *needed: str) -> None:
        """Raise RuntimeError if the engine was destroyed, ParameterError if other ranks still wait in a pass
        that failed here, OffloadedError if a state that a call needs (any, where none is named) is in host
        memory.
        """
        self._check_alive()
        self._schedule.check_passes()
        self._check_states(call, *needed)

    def _check_states(self, call: str, *needed: str) -> None:
        if offloaded := self._states.offloaded_states:
            check_on_device(offloaded, needed or STATES, call)

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
        try:
            # where an exception is ending the run, the others may not be there: ranks keep what they have
            if sys.exc_info()[0] is None:
                self._sync_replicas("engine.destroy()", keeps_writes=False)
        finally:
            self._close()

    def _close(self) -> None:
        self._destroyed = True
        self._missing_step.end()
        self._sharded.engine = None
        with ExitStack() as stack:  # every part is closed, whatever fails
            if self._collect_again is not None:
                stack.callback(self._collect_again)
            stack.callback(self.comm.close)
            if self._router is not None:
                stack.callback(self._router.close)
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


def _check_loss(loss: object) -> None:
    """Raise TypeError or RuntimeError for what autograd cannot start from."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"engine.backward needs the loss tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise RuntimeError(f"the loss has shape {list(loss.shape)}: reduce it, for example with loss.mean()")


def _whole_number(tokens: int | Tensor, device: torch.device) -> int | Tensor:
    """Return a number of tokens, a tensor on a device. Raises TypeError or ValueError for another value; a
    negative number in a tensor on a GPU is not noticed, because the host would have to wait for it.
    """
    if isinstance(tokens, Tensor):
        if tokens.numel() != 1 or tokens.dtype == torch.bool or tokens.is_floating_point():
            raise TypeError(
                f"num_tokens is a {tokens.dtype} tensor of shape {list(tokens.shape)}, expected one whole "
                "number, such as (labels != -100).sum()"
            )
        if tokens.device.type == "cpu":
            return _whole_number(int(tokens), device)
        return tokens.detach().reshape(()).to(device)
    if isinstance(tokens, bool) or not isinstance(tokens, (int, Integral)):
        raise TypeError(f"num_tokens is {tokens!r}, expected a whole number or a tensor with one")
    if not 0 <= tokens < 2**53:
        raise ValueError(f"num_tokens is {tokens}, expected a number from 0 to 2**53 - 1")
    return int(tokens)


def without_empty(loss: Tensor, tokens: int | Tensor) -> Tensor:
    """Return a loss, or zero for that of no tokens, which torch's functions return as NaN."""
    if isinstance(tokens, int):
        return loss if tokens else loss.nan_to_num()
    return torch.where(tokens > 0, loss, torch.zeros_like(loss))


def _iteration(scheduler: Any) -> int | None:
    """Return how often a scheduler of torch's or ours has stepped; None for one that counts otherwise."""
    count = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return count if isinstance(count, int) else None


# -- whole steps ------------------------------------------------------------------------------------
#
# Trains whole steps on ranks that have all layers, so that a script runs with and without stages.


def to_device(value: Any, device: torch.device) -> Any:
    """Return the tensors in tuples and lists on a device."""
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def loss_in(output: Any) -> Tensor:
    """Return the loss that a model has computed. Raises ParameterError if there is none."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.dim() == 0:
        found = output
    if not isinstance(found, Tensor):
        raise ParameterError("the model's output has no loss: pass loss_fn(output, labels) to train_batch")
    return found


WeightedLoss = tuple[Tensor, int | Tensor | None]
"""A micro-batch's loss and its number of tokens; None where losses are not weighted."""


def sum_losses(losses: Sequence[WeightedLoss], device: torch.device) -> Tensor:
    """Return the sum of weighted losses and that of their weights, (2,) in float64 on a device."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for loss, tokens in losses:
        weight = torch.as_tensor(1 if tokens is None else tokens, dtype=torch.float64, device=device)
        value = loss.detach().reshape(()).to(device, torch.float64)
        total += torch.stack([torch.where(weight > 0, value * weight, 0.0), weight])
    return total


NO_DATA = "engine.train_batch() needs data_iter, or training_data in initialize"


class WholeSteps:
    """Trains and evaluates whole steps of an engine whose ranks have all layers, as a pipeline does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._own_data: Iterator[Any] | None = None
        self._loss_fn: LossFunction | None = None

    def check_call(self, what: str) -> None:
        """Raise ParameterError if the script cannot make a pass or a step by itself."""

    def check_passes(self) -> None:
        """Raise ParameterError if a pass was left half-way in which other ranks wait for this one."""

    def restart_data(self) -> None:
        """Take the training_data anew: it resumes behind the last batch of a checkpoint."""
        self._own_data = None

    def train(self, data_iter: Iterator[Any] | None, loss_fn: LossFunction | None) -> Tensor:
        """Train a step; see :meth:`Engine.train_batch`."""
        engine = self._engine
        if not engine._is_managed:
            raise RuntimeError(
                "managed_gradient_accumulation is false (as in the presets of zlaunch.prepare), but "
                "train_batch() counts the micro-batches of a step: use a config without the key, or call "
                "engine.backward() and engine.step()"
            )
        micro_batches = self._take(data_iter, loss_fn, engine.gradient_accumulation_steps())
        engine.module.train()
        losses: list[WeightedLoss] = []
        for each in micro_batches:
            loss, tokens = self._loss_of_one(each)
            engine.backward(loss, num_tokens=tokens)
            losses.append((loss.detach(), tokens))
            engine.step()
        engine.last_loss = mean = self._mean_of(losses)
        return mean

    def evaluate(
        self, data_iter: Iterator[Any] | None, loss_fn: LossFunction | None, count: int | None
    ) -> Tensor:
        """Return a mean loss; see :meth:`Engine.eval_batch`."""
        engine = self._engine
        engine._check_alive()
        micro_batches = self._take(data_iter, loss_fn, count or engine.gradient_accumulation_steps())
        was_training = engine.module.training
        engine.module.eval()
        try:
            with torch.no_grad():
                return self._evaluate(micro_batches)
        finally:
            engine.module.train(was_training)

    def _evaluate(self, micro_batches: list[Any]) -> Tensor:
        return self._mean_of([self._loss_of_one(each) for each in micro_batches])

    def _take(self, data_iter: Any, loss_fn: LossFunction | None, count: int) -> list[Any]:
        engine = self._engine
        chosen = loss_fn or self._loss_fn or getattr(engine.module, "loss_fn", None)
        self._loss_fn = chosen
        found = self._next_ones(data_iter, count)
        if len(found) < count:
            raise StopIteration(f"data_iter ended after {len(found)} of {count} micro-batches")
        return found

    def _next_ones(self, data_iter: Any, count: int) -> list[Any]:
        """Return the next micro-batches of an iterator or the training_data, fewer at the end. Raises
        ParameterError where there are none, and for what would begin anew in each step.
        """
        engine = self._engine
        if data_iter is None:
            if engine.training_dataloader is None:
                raise ParameterError(NO_DATA)
            self._own_data = self._own_data or _endless(engine.training_dataloader)
            data_iter = self._own_data
        if iter(data_iter) is not data_iter:
            raise ParameterError(
                f"data_iter is a {type(data_iter).__name__}, which would restart in each step: call "
                "iter(...) on it once and pass the iterator"
            )
        return list(islice(data_iter, count))

    def _loss_of_one(self, micro_batch: Any) -> WeightedLoss:
        engine = self._engine
        labels = None
        tokens = None
        if isinstance(micro_batch, Mapping):
            given = {name: to_device(value, engine.device) for name, value in micro_batch.items()}
            tokens = self.take_tokens(given)
            if self._loss_fn is not None:
                labels = given.pop("labels", None)
            output = engine(**given)
        elif isinstance(micro_batch, (tuple, list)) and len(micro_batch) == 2:
            inputs, labels = to_device(micro_batch, engine.device)
            output = engine(*inputs) if isinstance(inputs, (tuple, list)) else engine(inputs)
        else:
            raise ParameterError(
                "expected a micro-batch that is a dict of the model's arguments or a pair of inputs and "
                f"labels, got {type(micro_batch).__name__}"
            )
        if self._loss_fn is None:
            return self.weighted(loss_in(output), tokens)
        found = self._loss_fn(output) if labels is None else self._loss_fn(output, labels)
        return self.weighted(found, tokens)

    def take_tokens(self, inputs: dict[str, Any]) -> Any:
        """Take the number of tokens out of a micro-batch, if it has one and losses are weighted by it."""
        by_tokens = self._engine.effective_config.loss_reduction == "tokens"
        return inputs.pop("num_tokens", None) if by_tokens else None

    def weighted(self, found: Any, tokens: Any) -> WeightedLoss:
        """Return a loss and its number of tokens, None where losses are not weighted. ``found`` is a loss, or
        the pair that a ``loss_fn`` has returned; ``tokens`` is what the micro-batch says. Raises what
        :meth:`Engine.backward` does.
        """
        loss = found
        if isinstance(found, tuple) and len(found) == 2:
            if tokens is not None:
                raise ParameterError(
                    "both loss_fn and the micro-batch give num_tokens: leave one of them out"
                )
            loss, tokens = found
        _check_loss(loss)
        advice = 'add "num_tokens" to the micro-batch, or return (loss, num_tokens) from loss_fn,'
        return loss, self._engine._checked_tokens(tokens, advice)

    def _mean_of(self, losses: list[WeightedLoss]) -> Tensor:
        """Return the mean over micro-batches and ranks, by tokens where these count. Collective."""
        total = sum_losses(losses, self._engine.device)
        self._engine.comm.all_reduce_scalars(total, "sums the losses")
        return (total[0] / total[1]).to(torch.promote_types(losses[0][0].dtype, torch.float32))


def _endless(loader: EngineLoader) -> Iterator[Any]:
    """Yield the batches of all epochs. Raises ParameterError if an epoch has none."""
    empty = 0
    while empty < 2:  # the rest of an epoch that was resumed may be empty
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
    raise ParameterError(f"{loader.name} yields no micro-batch: it has no samples, or can be read only once")


def _trained(engine: ReferenceType[Engine]) -> int:
    """Return how often an engine has trained: micro-batches and steps."""
    found = engine()
    return 0 if found is None else found.micro_steps + found.global_steps
