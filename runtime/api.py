"""``zlaunch.initialize`` and its companions: from a model and a config to an engine."""

from __future__ import annotations

import argparse
import atexit
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..cuda_ops.loader import set_mode
from . import access, preemption
from .activation import checkpointing
from .comm.collectives import Comm, end_process
from .comm.process_group import ends_well
from .config import Config, ConfigError, Effective, load, refuse_open, resolve
from .data import EngineLoader
from .engine import Engine
from .environment import read_environment
from .errors import OptimizerError, ParameterError
from .log import say, set_level, warn
from .memory.preflight import foresee
from .memory.resources import PINNED_SHARE
from .offload.manager import Offload
from .offload.options import choose_offload
from .optim.admission import needs_whole_tensors
from .optim.optimizer_handle import ZeroOptimizer, guard
from .optim.param_groups import groups_by_parameter, parameter_groups
from .optim.registry import build_optimizer, build_scheduler
from .optim.sharded_optimizer import ShardedOptimizer
from .precision.policy import Precision, choose_precision, dtype_named
from .sharding_options import sharding_options
from .zero import placeholder
from .zero.consistency import check_agreement
from .zero.eligible import find_refused
from .zero.hooks import ShardedModel
from .zero.leaf_modules import mark_leaves
from .zero.reduce import GradientOptions, GradientReducer
from .zero.replicated import place_rest
from .zero.unit_policy import Block, ShardingOptions, build_units, plan_blocks


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--config`` (also ``--deepspeed_config``), ``--deepspeed`` and ``--local_rank`` to a script's
    parser, those aside that it has already.
    """
    group = parser.add_argument_group("zlaunch")
    taken = parser._option_string_actions
    names = [name for name in ("--config", "--deepspeed_config") if name not in taken]
    if names:
        group.add_argument(*names, dest="deepspeed_config", help="config file (JSON or YAML)")
    if "--deepspeed" not in taken:
        group.add_argument(
            "--deepspeed", action="store_true", help="accepted for DeepSpeed scripts; has no effect"
        )
    if "--local_rank" not in taken:
        rank = read_environment().local_rank
        group.add_argument("--local_rank", type=int, default=rank, help="set by the launcher")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    **ignored: Any,
) -> torch.device:
    """Set up torch.distributed from the environment, once; without one, a world of this process alone.

    The backend is NCCL (and gloo for CPU tensors) where there is a GPU, else gloo. Further keywords of
    DeepSpeed's function are accepted. Returns this rank's device.
    """
    environment = read_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available() and dist_backend != "gloo":
        count = torch.cuda.device_count()
        index = environment.local_rank if count > 1 else 0
        if index >= count:
            raise RuntimeError(f"local rank {environment.local_rank} has no GPU: this process sees {count}")
        # A launcher gives each rank all GPUs, or by this variable one of its own.
        if count == 1 and environment.local_world_size > 1 and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise RuntimeError(
                f"{environment.local_world_size} ranks of this machine would share its only GPU, which NCCL "
                "does not allow: start one worker, or set CUDA_VISIBLE_DEVICES='' to train on the CPU"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
        if device.type == "cuda":
            options["device_id"] = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if dist_backend not in (None, "nccl"):  # NCCL is for GPU tensors alone
            backend = str(dist_backend)
        if environment.has_rendezvous:
            dist.init_process_group(backend, **options)
        elif environment.world_size > 1:
            raise RuntimeError(
                "WORLD_SIZE is set but not all of RANK, MASTER_ADDR, MASTER_PORT: "
                "start with zlaunch or torchrun"
            )
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            dist.init_process_group(
                backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, **options
            )
        atexit.register(end_process)
    ends_well(dist.group.WORLD)
    return device


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, EngineLoader | None, Any]:
    """Make ``model`` train under ZeRO as ``config`` says; DeepSpeed's function of this name.

    ``config`` is a path (JSON with comments, or YAML), a dict or base64 JSON; ``config_params`` and
    ``args.deepspeed_config`` are other names for it. ``optimizer`` is an instance, a callable from
    parameters, or None for the config's; likewise ``lr_scheduler``. Collective: every rank calls it with the
    same model and config, and starts from rank 0's values.

    Returns ``(engine, optimizer, dataloader, lr_scheduler)``, None for what there is not. Raises ConfigError
    for a bad config, RankMismatchError when the ranks differ, ValueError for arguments that do not fit
    together.
    """
    return make_engine(
        Engine,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=choose_config(args, config, config_params),
        mesh_param=mesh_param,
    )


E = TypeVar("E", bound=Engine)


def make_engine(
    kind: type[E],
    model: nn.Module | None,
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
    """:func:`initialize` for an engine of class ``kind``, with one config."""
    if model is None:
        raise ValueError("initialize needs a model")
    if mpu is not None or mesh_param is not None:
        raise ValueError("model parallelism (mpu, mesh_param) is not supported")
    loaded = load(config)
    refuse_open(loaded)
    set_level(loaded.config.log_level)
    _choose_kernels()
    device = init_distributed()
    comm = Comm(device, share=not _on_disk(loaded.config))
    preemption.listen()
    hidden, hidden_from = find_hidden_size(model)
    effective = resolve(loaded, world_size=comm.world_size, hidden_size=hidden, hidden_size_from=hidden_from)
    if comm.rank == 0:
        for warning in (*loaded.warnings, *effective.guesses()):
            warn(warning)
        # Scripts of DeepSpeed's, whose configs have meant something else, have an engine of their own.
        changed = effective.changed_defaults() if kind is not Engine else ()
        for line in (*effective.settled(), *changed):
            say(line)
    _check_parameters(model, comm)
    check_agreement(model, effective.digest(), comm)
    precision = choose_precision(effective.config)

    client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    groups = client.param_groups if client is not None else parameter_groups(model_parameters, model)
    if client is not None:
        _check_groups(client, model)
    checkpointing.apply(model, loaded.config.activation_checkpointing)
    if client is None:
        client = _make_optimizer(optimizer, effective, groups)
    zero = effective.config.zero_optimization
    whole = client is not None and needs_whole_tensors(
        client,
        whole=zero.stage == 0 or comm.world_size == 1,
        offloaded=zero.offload_optimizer is not None and zero.offload_optimizer.device != "none",
        allowed=bool(effective.config.zero_allow_untested_optimizer),
    )
    settings = choose_offload(effective, client)
    blocks, options = _plan(model, effective, comm)
    accumulation = int(effective.config.gradient_accumulation_steps or 1)
    snapshots = effective.config.checkpoint.is_asynchronous
    free = foresee(blocks, options, settings, client, precision, comm, accumulation, snapshots=snapshots)
    settings = replace(settings, pinned_budget_bytes=int(PINNED_SHARE * free.host))
    offload = Offload(settings, comm) if settings.any else None
    step = None
    with ExitStack() as undo:  # what has been made, should a part of it fail
        if offload is not None:
            undo.callback(offload.close)
        sharded, reducer = _shard(model, blocks, options, groups, comm, effective, precision, offload)
        undo.callback(sharded.close)
        if client is not None:
            step = ShardedOptimizer(
                client,
                [unit for unit in sharded.units if unit.trainable],
                reducer,
                comm,
                sharded=options.shard_optimizer,
                whole=whole,
                offloaded=offload is not None,
                background=comm.device.type == "cuda",
                on_device=comm.device.type == "cuda",
            )
        undo.pop_all()
    scheduler = _make_scheduler(lr_scheduler, effective, client)
    engine = kind(sharded, reducer, step, scheduler, precision, effective, offload)
    if client is not None:
        guard(client, engine, kind.optimizer_class)
    access.register(engine)
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
    engine.training_dataloader = loader
    _record(effective, comm)
    return engine, client, loader, scheduler


def _choose_kernels() -> None:
    try:
        set_mode(read_environment().kernels)
    except ValueError as error:
        raise ConfigError([f"ZLAUNCH_KERNELS: {error}"]) from None


def choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one that is given, whichever way. Raises ConfigError for none, or for two."""
    named = getattr(args, "deepspeed_config", None) if args is not None else None
    given = [source for source in (config, config_params, named) if source is not None]
    if not given and (last := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")):
        given = [last]  # --deepspeed_config_file on the command line
    if not given:
        raise ConfigError(
            [
                "initialize needs a config: config=, or --config/--deepspeed_config among the script's "
                "arguments"
            ]
        )
    if any(source != given[0] for source in given[1:]):
        raise ConfigError(["initialize was given two different configs: config= and args.deepspeed_config"])
    return given[0]


def _on_disk(config: Config) -> bool:
    """Whether sharded parameters rest on disk: each rank reads its own into memory that comes and goes, so
    the other ranks cannot read it in place.
    """
    section = config.zero_optimization.offload_param
    return section is not None and section.device == "nvme"


def find_hidden_size(model: nn.Module) -> tuple[int | None, str]:
    """The width of a model, for ``"auto"`` bucket sizes, and where it was found."""
    described = getattr(model, "config", None)
    for name in ("hidden_size", "d_model", "n_embd", "hidden_sizes"):
        value = getattr(described, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value, f"model.config.{name}"
    widths = [m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)]
    if widths:
        return max(widths), "the model's widest embedding"
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return (max(widths), "the model's widest linear layer") if widths else (None, "")


def _check_groups(client: torch.optim.Optimizer, model: nn.Module) -> None:
    if isinstance(client, ZeroOptimizer):
        raise OptimizerError("initialize was given the optimizer of another engine: give it a new one")
    known = {id(p) for p in model.parameters()}
    for group in client.param_groups:
        if any(id(p) not in known for p in group["params"]):
            raise OptimizerError("the optimizer holds a tensor that is not a parameter of the model")


def _check_parameters(model: nn.Module, comm: Comm) -> None:
    """Raises ParameterError on every rank if a parameter of some rank's model cannot be managed."""
    for rank, problem in enumerate(comm.exchange(find_refused(model))):
        if problem is not None:
            raise ParameterError(problem if rank == comm.rank else f"on rank {rank}, {problem}")


def _plan(model: nn.Module, effective: Effective, comm: Comm) -> tuple[list[Block], ShardingOptions]:
    """Decide which parameters go together."""
    leaf = effective.config.zero_optimization.leaf_module
    mark_leaves(model, classes=leaf.classes, names=leaf.names, suffixes=leaf.name_suffixes)
    cpu, poison = comm.device.type == "cpu", read_environment().debug_free == "poison"
    options = sharding_options(effective.config, cpu=cpu, poison=poison)
    return plan_blocks(model, options), options


def _shard(
    model: nn.Module,
    blocks: list[Block],
    options: ShardingOptions,
    groups: list[dict[str, Any]],
    comm: Comm,
    effective: Effective,
    precision: Precision,
    offload: Offload | None,
) -> tuple[ShardedModel, GradientReducer]:
    config = effective.config
    zero = config.zero_optimization
    group_of = groups_by_parameter(groups)
    place_rest(model, comm, precision.dtype)
    if offload is not None:
        trainable = (p for block in blocks for _, p in block.parameters if p.requires_grad)
        offload.expect(sum(placeholder.shape_of(p).numel() for p in trainable))
    build_units(blocks, group_of, precision.dtype, comm, options, offload)
    predivide = 1.0
    if config.prescale_gradients:
        predivide = (
            config.gradient_predivide_factor if config.gradient_predivide_factor != 1.0 else comm.world_size
        )
    reducer = GradientReducer(
        [unit for block in blocks for unit in block.units if unit.trainable],
        comm,
        GradientOptions(
            transient=options.shard_grads,
            dtype=dtype_named(config.communication_data_type),
            predivide=predivide,
        ),
    )
    sharded = ShardedModel(
        model,
        blocks,
        reducer,
        comm,
        options,
        prefetch_numel=int(zero.stage3_prefetch_bucket_size),
        max_live_numel=int(zero.stage3_max_live_parameters),
    )
    return sharded, reducer


def _make_optimizer(
    maker: Any, effective: Effective, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer | None:
    if not any(p.requires_grad for group in groups for p in group["params"]):
        return None
    if callable(maker):
        return maker(groups)  # type: ignore[no-any-return]
    section = effective.config.optimizer
    if section is None or section.type is None:
        return None
    try:
        return build_optimizer(section.type, dict(section.params), groups)
    except ValueError as error:
        raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None


def _make_scheduler(given: Any, effective: Effective, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        is_factory = callable(given) and not hasattr(given, "step")
        return given(optimizer) if is_factory else given
    section = effective.config.scheduler
    if section is None or section.type is None or optimizer is None:
        return None
    try:
        return build_scheduler(section.type, dict(section.params), optimizer)
    except ValueError as error:
        raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None


def _record(effective: Effective, comm: Comm) -> None:
    run_dir = read_environment().run_dir
    if comm.rank == 0 and run_dir:
        effective.write(os.path.join(run_dir, "config.effective.json"))
    if comm.rank == 0 and effective.config.dump_state:
        for path, value, source in effective.table():
            print(f"{path} = {value}  ({source})", flush=True)
