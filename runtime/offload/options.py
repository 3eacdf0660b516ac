"""Builds OffloadOptions from the config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..config import ConfigError, Effective
from ..config.zero import OffloadOptimizer, OffloadParam
from ..optim.update_rule import SliceUpdate, State, UpdateRule, is_elementwise
from ..registry.optimizers import ELEMENTWISE
from ..step_choice import collective_step_of
from ..zero.layout import TILE_NUMEL
from .manager import Offload, OffloadOptions, Tier

if TYPE_CHECKING:
    from ..config.schema import Config


def offload_options(config: Config, state_count: int) -> OffloadOptions:
    """Build OffloadOptions; ``state_count`` is how many tensors the optimizer keeps for each element."""
    zero, aio = config.zero_optimization, config.aio
    optimizer = zero.offload_optimizer or OffloadOptimizer()
    parameters = zero.offload_param or OffloadParam()
    return OffloadOptions(
        optimizer=Tier(optimizer.device),
        parameters=Tier(parameters.device),
        optimizer_path=optimizer.nvme_path,
        parameters_path=parameters.nvme_path,
        pin=all(section.pin_memory for section in (optimizer, parameters) if section.device != "none"),
        ratio=float(optimizer.ratio),
        max_in_cpu_numel=int(parameters.max_in_cpu),
        buffer_count=int(optimizer.buffer_count),
        tile_numel=min(int(zero.sub_group_size), TILE_NUMEL),
        block_bytes=int(aio.block_size),
        threads=max(int(aio.queue_depth), int(aio.intra_op_parallelism)),
        state_count=state_count,
        narrow_masters=config.bf16.master_weights == "stochastic",
    )


def choose_offload(effective: Effective, optimizer: torch.optim.Optimizer | None) -> OffloadOptions:
    """Build OffloadOptions for an optimizer. Raises ConfigError for one that cannot be offloaded."""
    section = effective.config.zero_optimization.offload_optimizer
    states = state_count(optimizer)
    known = collective_step_of(optimizer) is not None
    if optimizer is not None and section is not None and section.device == "nvme" and not known:
        try:
            groups = range(len(optimizer.param_groups))
            states = max([0, *(_count_elementwise_states(optimizer, index) for index in groups)])
        except ValueError as error:
            raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None
    return offload_options(effective.config, states)


def mean_state_count(optimizer: torch.optim.Optimizer | None, numel_of: Callable[[Tensor], int]) -> float:
    """Count the tensors that an optimizer keeps for an element, in the mean over its parameters. Where a
    trial step fails, or might change a class that is not known, they are as many as :func:`state_count` says.
    """
    most, kind = state_count(optimizer), collective_step_of(optimizer)
    if optimizer is None or (kind is None and type(optimizer) not in ELEMENTWISE):
        return most
    total, numel = 0.0, 0
    for index, group in enumerate(optimizer.param_groups):
        own = sum(numel_of(parameter) for parameter in group["params"])
        try:
            count = _count_elementwise_states(optimizer, index) if kind is None else kind.group_states(group)
        except ValueError:  # it is no plan's business to say what is wrong
            count = most
        total, numel = total + count * own, numel + own
    return total / numel if numel else most


def state_count(optimizer: torch.optim.Optimizer | None) -> int:
    """Count the tensors that an optimizer keeps for each element; 2 where it is not known."""
    if optimizer is None:
        return 0
    if (kind := collective_step_of(optimizer)) is not None:
        return kind.state_count(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return 2 + any(group.get("amsgrad", False) for group in optimizer.param_groups)


def _count_elementwise_states(optimizer: torch.optim.Optimizer, index: int) -> int:
    """Count the tensors that the optimizer keeps per element of a param group, by letting it make one step
    on a dummy. Raises ValueError if it cannot.
    """
    rule = UpdateRule(optimizer)
    try:
        leaf = torch.zeros(16, requires_grad=True)
        state: State = defaultdict(dict)
        for key, value in _begun(optimizer, index).items():
            state[leaf][key] = torch.zeros(16) if value.dim() else value.clone()
        rule.begin(1.0)
        with torch.no_grad():
            rule.apply([SliceUpdate(index, leaf, torch.zeros(16))], state)
        return sum(is_elementwise(value, leaf) for value in state[leaf].values())
    except Exception as error:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} cannot be offloaded to NVMe: a step on a flat "
            f"tensor failed: {error}"
        ) from error


def _begun(optimizer: torch.optim.Optimizer, index: int) -> dict[str, Tensor]:
    """Return the state that a group's parameters have before the first step (Adagrad)."""
    members = optimizer.param_groups[index]["params"]
    first = next((p for p in members if p.dim()), None)  # of a number, a count would look like a state
    own = {} if first is None else optimizer.state.get(first, {})
    return {key: value for key, value in own.items() if isinstance(value, Tensor)}


def init_stores(settings: Config | None, remote_device: str | None, pin: bool) -> Callable[[Comm], Offload]:
    """Choose the stores of a model that is built in ``zero.Init`` by its arguments and the config. Raises
    ValueError; the function that it returns raises DiskError.
    """
    section = settings.zero_optimization.offload_param if settings is not None else None
    device = remote_device or (section.device if section is not None else "none")
    path = section.nvme_path if section is not None else None
    if device == "nvme" and not path:
        raise ValueError('remote_device "nvme" needs a config with offload_param.nvme_path')
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(f'remote_device {device!r}: expected "none", "cpu" or "nvme"')
    options = OffloadOptions(
        parameters=Tier(device),
        parameters_path=path,
        pin=pin or (section is not None and section.pin_memory),
        max_in_cpu_numel=int(section.max_in_cpu) if section is not None else 0,
    )
    return partial(Offload, options)
