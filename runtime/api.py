"""Defines ``zlaunch.initialize`` and the function that adds its arguments to a script's parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .arguments import check_arguments, choose_model
from .build import build_engine
from .config import ConfigError
from .data import EngineLoader
from .engine import Engine
from .environment import read_environment


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--config`` (also ``--deepspeed_config``), ``--deepspeed`` and ``--local_rank`` to a script's
    parser, except those it already defines.
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
    """Build an engine that trains ``model`` under ZeRO by ``config``; DeepSpeed's function of this name.

    ``config`` is a path (JSON with comments, or YAML), a dict or base64 JSON; ``config_params`` and
    ``args.deepspeed_config`` are other names for it. A model as the first argument is the ``model``.
    ``optimizer`` is an instance, a callable that takes the parameters, or None for the config's.
    ``lr_scheduler`` is an instance, a callable that takes the optimizer, or None for the config's.
    ``mpu`` returns process groups, as Megatron's does; they must match the parallel sizes in the config.
    Collective: every rank calls it with the same model and config, and starts from rank 0's values.

    Returns ``(engine, optimizer, dataloader, lr_scheduler)``, with None for what was neither given nor
    configured. Raises ConfigError for a bad config, RankMismatchError when the ranks differ, TypeError for
    an argument of another type, ValueError for arguments that do not fit together.
    """
    args, model = choose_model(args, model)
    check_arguments(
        args=args,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
    )
    return build_engine(
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


def choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the config, however it was given. Raises ConfigError for none, or for two different ones."""
    named = getattr(args, "deepspeed_config", None) if args is not None else None
    given = [source for source in (config, config_params, named) if source is not None]
    if not given and (last := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")):
        given = [last]  # --deepspeed_config_file on the command line
    if not given:
        ways = "config=, or --config/--deepspeed_config among the script's arguments"
        raise ConfigError([f"initialize needs a config: {ways}"])
    if any(source != given[0] for source in given[1:]):
        raise ConfigError(["initialize was given two different configs: config= and args.deepspeed_config"])
    return given[0]
