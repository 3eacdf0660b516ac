"""Assembles an engine from a model, an optimizer and a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..cuda_ops.loader import set_mode
from . import preemption
from .activation import checkpointing
from .arguments import is_factory, made_optimizer, made_scheduler
from .averaging import Averaging
from .checkpoint.export.consolidate import save_weights
from .checkpoint.in_memory import make_checkpointer
from .comm import deadlock
from .comm.collectives import Comm
from .comm.given_groups import check_given_groups
from .comm.nodes import divides_layers, find_shard_group, make_link
from .comm.process_group import init_distributed
from .comm.shared_memory import connect
from .compile import compile_blocks
from .config import Config, ConfigError, Effective, Loaded, find_mesh, load, refuse_open, resolve
from .config.schema import ActivationCheckpointing
from .data import EngineLoader
from .engine import Engine
from .environment import read_environment
from .errors import OptimizerError, ParameterError
from .host_memory import PINNED_SHARE
from .log import detail, say, set_level, show, warn
from .memory.advice import MemoryAdviser
from .memory.estimate import Setting
from .memory.preflight import preflight
from .models import find_hidden_size
from .observe.clock import DISK
from .observe.comms_logger import LoggedComm
from .observe.limits import find_overflow_hint, measure_costs
from .observe.reporter import observe, open_monitor
from .observe.router import watch_router
from .offload import disk
from .offload.manager import Offload, OffloadOptions, Tier, choose_offload
from .offload.states import StateMover
from .offload.step import BackgroundStep
from .offload.transfer import HostLink
from .optim.registry import (
    build_optimizer,
    build_scheduler,
    check_local_steps,
    check_loss_reduction,
    check_narrow,
    check_step_in_backward,
    choose_method,
    keeps_whole_gradients,
    needs_whole_tensors,
    prepare,
    steps_elements,
)
from .optim.slices import groups_by_parameter, parameter_groups
from .optim.step import ShardedOptimizer, StepMethod
from .parallel.expert_size import settle_expert_size
from .parallel.pipeline import install_forwards
from .parallel.schedule import PipelineSchedule, divide_layers
from .parallel.sequence import share_sequences
from .parallel.tensor import share_layers
from .precision import (
    DeviceLossScaler,
    LossScaler,
    Precision,
    choose_buffer_types,
    dtype_named,
    settle_precision,
)
from .report import announce, describe
from .restarts import note_engine, read_restarts
from .script.accept import check_consistency, find_refused
from .script.handles import Handles
from .script.module_methods import intercept_module
from .script.optimizer import ZeroOptimizer, guard
from .zero import placeholder
from .zero.hooks import ShardedModel
from .zero.layout import TILE_NUMEL
from .zero.policy import (
    DIVIDED_NUMEL,
    UNIT_NUMEL,
    UNIT_NUMEL_CPU,
    Block,
    ShardingOptions,
    UnitFactory,
    mark_configured,
    mark_lists_of_experts,
    place_rest,
    plan_blocks,
)
from .zero.reduce import GradientOptions, GradientReducer
from .zero.store import DeviceStores
from .zero.unit import Unit

# -- gradient options -------------------------------------------------------------------------------
#
# Chooses from the config how gradients are sent and summed.


def choose_gradient_options(
    config: Config, *, transient: bool = False, predivide: float = 1.0
) -> GradientOptions:
    """Return the options of a reducer, which divides gradients by ``predivide`` before it sends them.

    Sums of several gradients rest in fp32, or in ``data_types.grad_accum_dtype``. The only one of a step
    rests as it was reduced, unless that key says otherwise; beside stochastic masters, which are bf16, in
    bf16. A unit that is stepped in the backward pass is clipped in the memory of its gradient, in fp32.
    """
    chosen = dtype_named(config.data_types.grad_accum_dtype)
    sums = None if chosen == torch.float32 else chosen  # None: float64 in such a model
    is_one = not config.accumulates
    single = torch.bfloat16 if config.bf16.master_weights == "stochastic" and is_one else sums
    return GradientOptions(
        transient=transient,
        dtype=dtype_named(config.communication_data_type),
        single=single,
        keeps_reduced=is_one and chosen is single is None and not config.zero_optimization.step_in_backward,
        sums=sums,
        predivide=predivide,
    )


# -- build ------------------------------------------------------------------------------------------


E = TypeVar("E", bound=Engine)


def build_engine(
    kind: type[E],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    *,
    mpu: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any,
    mesh_param: Any = None,
) -> tuple[E, torch.optim.Optimizer | None, EngineLoader | None, Any]:
    """Build an engine of class ``kind`` with all its parts; see :func:`zlaunch.initialize`.

    Eight phases. Each uses what those before it have made, and what fails on one rank fails on all: from the
    second phase on, ranks tell each other.
    """
    if mesh_param is not None:
        raise ValueError("mesh_param is not supported: set the config's parallel section")

    # 1. The config, first: its errors need no process group, and no other rank that would wait.
    loaded = _read_config(config)

    # 2. The ranks. The watch for deadlocks begins before the first collective.
    deadlock.install()
    comm, expert_size_from = _join_ranks(loaded, model, optimizer)
    if mpu is not None:
        check_given_groups(mpu, comm.mesh, comm.rank)
    preemption.install()

    # 3. "auto" values, which depend on the number of ranks, on the model, and on an earlier attempt.
    effective = _resolve_config(loaded, model, comm, expert_size_from, is_compat=kind is not Engine)

    # 4. The model's division between ranks, before an optimizer takes parameters: each rank keeps its shards
    #    of shared layers, and the layers of its stages. The checks come first, while every rank has the same
    #    model.
    _check_parameters(model, comm)
    check_consistency(model, effective.digest(), comm)
    share_layers(model, effective.config, comm)
    pipeline = divide_layers(model, effective.config, comm)
    loss_parts = share_sequences(model, effective.config, comm)

    # 5. What the script may replace by its own: trackers, precision, optimizer. Whether the optimizer suits
    #    the config is checked before memory is taken. Checkpointed activations wrap compiled forwards, and a
    #    stage's forwards wrap those: in this order.
    monitor = open_monitor(effective, comm)
    precision = settle_precision(effective.config, comm)
    overflow_hint = find_overflow_hint(model, effective.config)
    if overflow_hint and comm.rank == 0:
        warn(f"if gradients overflow: {overflow_hint}")
    client, groups = _choose_optimizer(optimizer, model_parameters, model, effective)
    _tell_overridden(effective, comm, optimizer, client, lr_scheduler)
    compile_blocks(model, effective.config.compile, comm.mesh, warns=comm.rank == 0)
    activations = _recomputed_layers(model, loaded.config, pipeline, comm)
    checkpointing.apply(model, activations, comm, loss_parts)
    if pipeline is not None:
        install_forwards(pipeline.sequence, pipeline.passes)
    whole_steps = pipeline is not None or "pipeline" in loaded.raw or kind.trains_whole_steps
    _check_whole_steps(effective, whole_steps)
    if client is not None:
        check_narrow(client, effective.config, precision.dtype)
    whole = client is not None and _needs_whole(client, effective, comm)
    check_step_in_backward(client, effective, comm, whole=whole)
    check_local_steps(client, effective.config, comm)
    check_loss_reduction(client, effective.config)

    # 6. The plan of units, and whether a rank's memory suffices for it: before any of it is allocated.
    blocks, options = _plan(model, effective, comm)
    offload, setting = _make_offload(effective, client, blocks, options, precision, comm, model)

    # 7. The shards. From here on parameters live in units; what exists is closed if a later part fails, so
    #    that the script gets its model back.
    on_gpu = comm.device.type == "cuda"
    step = None
    with ExitStack() as undo:
        if offload is not None:
            undo.callback(offload.close)
        stores = offload or DeviceStores(precision.narrow_masters)
        factory = UnitFactory(precision.dtype, comm, options, stores)
        keeps = keeps_whole_gradients(client)
        sharded, reducer = _shard(model, blocks, factory, groups, effective, offload, keeps)
        undo.callback(sharded.close)
        if client is not None:
            step = ShardedOptimizer(
                client,
                [unit for unit in sharded.units if unit.trainable],
                reducer,
                comm,
                whole=whole,
                make_method=_choose_method(client, effective.config, comm, offload),
                on_device=on_gpu,
                used_first=sharded.used_first,
            )
        scheduler = _make_scheduler(lr_scheduler, effective, client)
        undo.pop_all()

    # 8. The engine, and what surrounds it. Optimizer and model are bound to it last, when every call that
    #    they lead to it works.
    scaler: LossScaler | DeviceLossScaler = precision.scaler
    if scaler.dynamic and step is not None and step.decides_on_device:
        scaler = DeviceLossScaler(precision.scaler, comm.device)
    engine = kind(
        sharded,
        step,
        lr_scheduler=scheduler,
        precision=precision,
        scaler=scaler,
        effective=effective,
        handles=Handles(sharded, reducer, step, factory, effective.config, precision.dtype),
    )
    checkpoints = make_checkpointer(
        engine,
        sharded,
        step,
        scaler=scaler,
        effective=effective,
        make_link=partial(HostLink, comm.device, pin=on_gpu),
        save_weights=partial(save_weights, sharded),
    )
    adviser = MemoryAdviser(
        setting,
        sharded.units,
        None if step is None else step.optimizer,
        comm.device,
        loaded.raw,
        checkpoints=activations.enabled,
        model=model,
    )

    def explain(asked_bytes: int, where: str) -> str:
        sizes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        return adviser.explain(asked_bytes, where, *sizes)

    costs = measure_costs(model, comm, setting, precision, offload)
    # The report shows rank 0's steps.
    patterns = effective.config.expert_parallel.experts
    router = None if comm.rank else watch_router(model, patterns, comm.device)
    disk_waits = {} if offload is None else {DISK: lambda: disk.waited.seconds}
    engine.attach(
        checkpoints=checkpoints,
        states=StateMover(sharded, step, effective.config),
        offload=offload,
        monitor=monitor,
        around=observe(engine, effective.config, monitor, disk_waits, explain, costs, overflow_hint),
        schedule=None if pipeline is None else partial(PipelineSchedule, pipeline=pipeline),
        router=router,
    )
    if monitor.enabled:
        engine.step_observers.append(monitor.after_step)
    if client is not None and comm.rank == 0 and not steps_elements(client):
        engine.step_observers.append(lambda _: checkpoints.check_state())
    if client is not None:
        guard(client, engine, kind.optimizer_class or ZeroOptimizer)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    _record(effective, comm, costs.limits)
    return engine, client, engine.training_dataloader, engine.lr_scheduler


def _read_config(config: Any) -> Loaded:
    """Load the config, and set what holds for the whole process. Raises ConfigError with all its errors."""
    loaded = load(config)
    refuse_open(loaded)
    set_level(loaded.config.log_level)
    _choose_kernels()
    return loaded


def _resolve_config(
    loaded: Loaded, model: nn.Module, comm: Comm, expert_size_from: str, *, is_compat: bool
) -> Effective:
    """Fill in "auto" values. Rank 0 prints what it guessed. With ``is_compat`` (a DeepSpeed script), it also
    prints the defaults that differ from DeepSpeed's.
    """
    hidden, hidden_from = find_hidden_size(model)
    effective = resolve(
        loaded,
        world_size=comm.world_size,
        **read_restarts(),
        hidden_size=hidden,
        hidden_size_from=hidden_from,
        expert_size=comm.mesh.expert,
        expert_size_from=expert_size_from,
    )
    if comm.rank == 0:
        for warning in (*loaded.warnings, *effective.guesses(), *effective.batch_warnings):
            warn(warning)
        for line in effective.resolved_auto():
            detail(line)
        if expert_size_from:
            say(f'parallel.expert: "auto" is {comm.mesh.expert}: {expert_size_from}')
        if is_compat:
            for line in effective.changed_defaults():
                say(line)
    return effective


def _tell_overridden(
    effective: Effective, comm: Comm, given: Any, client: torch.optim.Optimizer | None, scheduler: Any
) -> None:
    """Warn, on rank 0, about sections of the config that the script's own objects replace."""
    overridden = []
    if given is not None and client is not None:
        overridden += effective.override("optimizer", type(client).__name__)
    if scheduler is not None:
        overridden += effective.override("scheduler", "its own scheduler")
    if comm.rank == 0:
        for warning in overridden:
            warn(warning)


def _recomputed_layers(
    model: nn.Module, config: Config, pipeline: Any, comm: Comm
) -> ActivationCheckpointing:
    """Return the section ``activation_checkpointing``, enabled if the pipeline's interval asks for it.

    DeepSpeed's PipelineModule takes the interval, and recomputes its layers itself.
    """
    section = config.activation_checkpointing
    interval = config.pipeline.activation_checkpoint_interval
    if not interval:
        return section
    set_interval: Any = getattr(model, "set_checkpoint_interval", None)
    if callable(set_interval):
        set_interval(interval)
        return section
    if pipeline is None:
        if comm.rank == 0:
            warn(
                "pipeline.activation_checkpoint_interval has no effect without pipeline stages: use "
                "activation_checkpointing.enabled"
            )
        return section
    return section.model_copy(update={"enabled": True})


def _check_whole_steps(effective: Effective, whole_steps: bool) -> None:
    """Raise ConfigError if train_batch() counts micro-batches, but the config leaves that to the script."""
    if whole_steps and not effective.config.managed_gradient_accumulation:
        raise ConfigError(
            [
                f"{effective.loaded.origin}: managed_gradient_accumulation: false is not supported with "
                "pipeline parallelism, where train_batch() counts the micro-batches of a step: remove it"
            ]
        )


def _choose_kernels() -> None:
    try:
        set_mode(read_environment().kernels)
    except ValueError as error:
        raise ConfigError([f"ZLAUNCH_KERNELS: {error}"]) from None


def _join_ranks(loaded: Loaded, model: nn.Module, optimizer: Any) -> tuple[Comm, str]:
    """Return the communicator, and where an expert-parallel size of "auto" comes from."""
    config = loaded.config
    device = init_distributed()
    share = not _on_disk(config)
    group = find_shard_group(config)
    shape = find_mesh(loaded, dist.get_world_size())
    needs_whole = ""
    if isinstance(optimizer, torch.optim.Optimizer) and not steps_elements(optimizer):
        needs_whole = f"the optimizer {type(optimizer).__name__} may need whole parameters"
    expert_size, expert_size_from = settle_expert_size(loaded, model, shape, device, needs_whole=needs_whole)
    if expert_size != shape.expert:
        shape = replace(shape, data=shape.data // expert_size, expert=expert_size)
    mesh = None if group is None and len(shape.axes) == 1 else partial(make_link, group, shape)
    if config.comms_logger.enabled:
        logged = LoggedComm(config.comms_logger, device, connect=connect, share=share, mesh=mesh)
        return logged, expert_size_from
    return Comm(device, connect=connect, share=share, mesh=mesh), expert_size_from


def _on_disk(config: Config) -> bool:
    """Tell whether sharded parameters are kept on disk: each rank then reads its part into temporary memory,
    which other ranks cannot read in place.
    """
    section = config.zero_optimization.offload_param
    return section is not None and section.device == "nvme"


def _choose_optimizer(
    given: Any, model_parameters: Iterable[Any] | None, model: nn.Module, effective: Effective
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]]]:
    """Return the optimizer that was given or that the config names, if any, and the parameter groups."""
    if isinstance(given, ZeroOptimizer):
        raise OptimizerError("the optimizer belongs to another engine: pass a new one to initialize")
    if isinstance(given, torch.optim.Optimizer):
        return _of_the_model(given, model)
    groups = parameter_groups(model_parameters, model)
    section = effective.config.optimizer
    if not any(p.requires_grad for group in groups for p in group["params"]):
        return None, groups
    if callable(given):
        return _of_the_model(made_optimizer(given(groups)), model)
    if section is None or section.type is None:
        return None, groups
    try:
        made = build_optimizer(section.type, dict(section.params), groups, model)
        return made, made.param_groups
    except ValueError as error:
        raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None


def _of_the_model(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
    """Return an optimizer and its groups. Raises OptimizerError for tensors from elsewhere."""
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerError("the optimizer has a tensor that is not a parameter of the model")
    return optimizer, optimizer.param_groups


def _needs_whole(optimizer: torch.optim.Optimizer, effective: Effective, comm: Comm) -> bool:
    zero = effective.config.zero_optimization
    prepare(optimizer, comm, divides_layers=divides_layers(comm))
    return needs_whole_tensors(
        optimizer,
        whole=(zero.stage == 0 or comm.world_size == 1) and not divides_layers(comm),
        offloaded=zero.offload_optimizer is not None and zero.offload_optimizer.device != "none",
        allowed=bool(effective.config.zero_allow_untested_optimizer),
    )


def _choose_method(
    client: torch.optim.Optimizer,
    config: Config,
    comm: Comm,
    offload: Offload | None,
) -> Callable[[Sequence[Unit]], StepMethod] | None:
    """Return what makes the object that steps units otherwise than all at once on the device, if any."""
    chosen = choose_method(client, config, comm)
    if chosen is not None or offload is None:
        return chosen
    return lambda units: BackgroundStep(units, comm, comm.device.type == "cuda")


def _make_offload(
    effective: Effective,
    optimizer: torch.optim.Optimizer | None,
    blocks: list[Block],
    options: ShardingOptions,
    precision: Precision,
    comm: Comm,
    model: nn.Module,
) -> tuple[Offload | None, Setting]:
    """Check that a rank's memory suffices; build the Offload if the config asks for one, and return it with
    what the plan has counted.
    """
    config = effective.config
    chosen = choose_offload(effective, optimizer)
    in_memory = config.checkpoint.in_memory
    setting, free = preflight(
        blocks,
        options,
        chosen,
        optimizer,
        precision,
        comm,
        config.accumulates,
        snapshots=int(config.checkpoint.is_asynchronous) + int(in_memory is not None),
        # the new ones are whole before the old ones go
        kept_snapshots=0 if in_memory is None else 2 * int(in_memory.copies),
        model=model,
        grad_bytes=_grad_bytes(choose_gradient_options(config), chosen, precision, comm),
        steps_in_backward=config.zero_optimization.step_in_backward,
        is_enforced=_is_memory_plan_enforced(config),
        prefetch_numel=int(config.zero_optimization.stage3_prefetch_bucket_size),
    )
    chosen = replace(chosen, pinned_budget_bytes=int(PINNED_SHARE * free.host))
    return Offload(chosen, comm) if chosen.any else None, setting


def _grad_bytes(options: GradientOptions, offload: OffloadOptions, precision: Precision, comm: Comm) -> int:
    """Return the bytes of an element of a step's first gradient, where that stays on the device."""
    if options.keeps_reduced and precision.dtype is not None and offload.optimizer is Tier.DEVICE:
        return comm.link.reduced_dtype(options.dtype or precision.dtype).itemsize
    return (options.single or torch.float32).itemsize


def _is_memory_plan_enforced(config: Config) -> bool:
    """Tell whether a plan that does not fit is an error. Raises ValueError for another word."""
    asked = read_environment().memory_plan
    if asked not in ("", "error", "warn"):
        raise ValueError(f"ZLAUNCH_MEMORY_PLAN={asked}: expected warn or error")
    return (asked or config.memory_plan) == "error"


def _check_parameters(model: nn.Module, comm: Comm) -> None:
    """Raise ParameterError on every rank if a parameter of any rank's model cannot be managed."""
    for rank, problem in enumerate(comm.exchange(find_refused(model))):
        if problem is not None:
            raise ParameterError(problem if rank == comm.rank else f"on rank {rank}, {problem}")


def _plan(model: nn.Module, effective: Effective, comm: Comm) -> tuple[list[Block], ShardingOptions]:
    """Plan the blocks, which are the parameters that share units, and the sharding options."""
    zero = effective.config.zero_optimization
    missing = mark_configured(model, zero.leaf_module)
    if missing and comm.rank == 0:
        warn(f"leaf_module: no module of the model matches {', '.join(map(repr, missing))}")
    mark_lists_of_experts(model)
    # a unit is reduced and, from stage 1 on, gathered as a whole
    bucket = int(zero.reduce_bucket_size)
    if zero.stage >= 1:
        bucket = min(bucket, int(zero.allgather_bucket_size))
    largest = UNIT_NUMEL_CPU if comm.device.type == "cpu" else UNIT_NUMEL
    options = ShardingOptions(
        shard_optimizer=zero.stage >= 1,
        shard_grads=zero.stage >= 2,
        shard_params=zero.stage >= 3,
        bucket_numel=max(1, min(bucket, largest)),
        minimum_numel=max(4096, int(zero.stage3_module_granularity_threshold)),
        divided_numel=int(zero.stage3_unit_size) or int(zero.stage3_max_live_parameters) or DIVIDED_NUMEL,
        persistence_numel=int(zero.stage3_param_persistence_threshold),
        all_persistent_numel=int(zero.stage3_model_persistence_threshold),
        tile_numel=min(int(zero.sub_group_size), TILE_NUMEL),
        poison=read_environment().debug_free == "poison",
    )
    blocks = plan_blocks(model, options)
    around = [block.around for block in blocks if block.around is not None]
    if around and comm.rank == 0:
        divided = {id(block) for block in around if block.around is None}
        parts = sum(1 for block in blocks if block.around is not None and block.parameters)
        limit = f"{options.divided_numel:,} parameters"
        detail(f"stage 3: {len(divided)} blocks of more than {limit} are divided into {parts} parts")
    return blocks, options


def _shard(
    model: nn.Module,
    blocks: list[Block],
    factory: UnitFactory,
    groups: list[dict[str, Any]],
    effective: Effective,
    offload: Offload | None,
    keeps_gradients: bool,
) -> tuple[ShardedModel, GradientReducer]:
    config = effective.config
    zero = config.zero_optimization
    comm = factory.comm
    options = factory.options
    types = choose_buffer_types(config, factory.dtype)
    rounded = types.rounded_parameters(model)
    if rounded and comm.rank == 0:
        warn(
            f"keep_in_fp32_modules applies to buffers only: {len(rounded)} parameters, such as {rounded[0]}, "
            f"are cast to {factory.dtype}, with fp32 master weights"
        )
    unmatched = types.unmatched(model)
    # a stage of a pipeline has a part of the names
    if unmatched and comm.mesh.pipeline == 1 and comm.rank == 0:
        warn(f"data_types.keep_in_fp32_modules: {unmatched[0]!r} matches no parameter or buffer")
    place_rest(model, comm, types)
    if offload is not None:
        trainable = (p for block in blocks for _, p in block.parameters if p.requires_grad)
        offload.expect(sum(placeholder.shape_of(p).numel() for p in trainable))
    factory.build(blocks, groups_by_parameter(groups))
    reducer = GradientReducer(
        [unit for block in blocks for unit in block.units if unit.trainable],
        comm,
        choose_gradient_options(
            config,
            transient=options.shard_grads and not keeps_gradients,
            predivide=Averaging.of(config, comm.mesh).predivide,
        ),
    )
    sharded = ShardedModel(
        model,
        blocks,
        reducer,
        comm,
        options,
        intercept=intercept_module,
        prefetch_numel=int(zero.stage3_prefetch_bucket_size),
        max_live_numel=_choose_max_live(effective, blocks, comm),
    )
    return sharded, reducer


def _choose_max_live(effective: Effective, blocks: Sequence[Block], comm: Comm) -> int:
    """Return how many elements of sharded units may be unsharded at one time.

    The default is DeepSpeed's, but always holds a block and what is gathered ahead of the next. A limit that
    the config gives is kept; a warning says where it leaves no room to gather a block ahead.
    """
    zero = effective.config.zero_optimization
    path = "zero_optimization.stage3_max_live_parameters"
    limit = int(zero.stage3_max_live_parameters)
    prefetch = int(zero.stage3_prefetch_bucket_size)
    two = 2 * max((block.numel for block in blocks if not block.is_root), default=0)
    loaded = effective.loaded
    if path not in loaded.given or path in loaded.auto:
        return max(limit, blocks[0].numel + two + prefetch)
    if 0 < limit < two and prefetch and zero.stage >= 3 and comm.world_size > 1 and comm.rank == 0:
        warn(
            f"{path}: {limit} elements are less than two of the model's largest blocks: these are not "
            "gathered while the block before computes, which costs speed. "
            f"Set at least {two}, or leave the key out"
        )
    return limit


def _make_scheduler(given: Any, effective: Effective, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        made = made_scheduler(given(optimizer)) if is_factory(given) else given
        scheduled = getattr(made, "optimizer", None)
        if isinstance(scheduled, torch.optim.Optimizer) and optimizer is not None:
            own = {id(group) for group in optimizer.param_groups}
            if not any(id(group) in own for group in scheduled.param_groups):
                raise OptimizerError(
                    f"lr_scheduler: {type(made).__name__} was made for another optimizer than the engine's "
                    f"{type(optimizer).__name__}: pass its optimizer too, or a callable that takes an "
                    "optimizer and returns a scheduler"
                )
        return made
    section = effective.config.scheduler
    if section is None or section.type is None or optimizer is None:
        return None
    try:
        return build_scheduler(section.type, dict(section.params), optimizer)
    except ValueError as error:
        raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None


def _record(effective: Effective, comm: Comm, limits: Mapping[str, float]) -> None:
    run_dir = read_environment().run_dir
    size = effective.config.train_batch_size
    micro = effective.config.train_micro_batch_size_per_gpu
    note_engine(micro)
    if effective.config.checkpoint.on_signal:
        preemption.act_on_request()
    if comm.rank == 0:
        about = {"train_batch_size": size, "micro_batch_size": micro}
        announce("environment", **describe(comm.device), limits=limits, **about)
    if comm.rank == 0 and run_dir:
        effective.write(os.path.join(run_dir, "config.effective.json"))
    if comm.rank == 0 and effective.config.dump_state:
        for path, value, source in effective.table():
            show(f"{path} = {value}  ({source})")
