"""Decides where each unit's shard is kept, and owns the memory and the files: one object per engine."""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cuda_ops.step import SliceUpdate
from ..comm.collectives import Comm
from ..comm.pending import Pending
from ..config import ConfigError, Effective
from ..config.zero import OffloadOptimizer, OffloadParam
from ..errors import OptimizerError
from ..optim.registry import collective_step_of, steps_elements
from ..optim.update_rule import State, UpdateRule, is_elementwise
from ..zero.layout import TILE_NUMEL, tile_ranges
from ..zero.store import (
    DeviceStore,
    DeviceValues,
    ShardFacts,
    ShardStore,
    ValueStore,
    master_on_device,
    values_on_device,
)
from .disk import DiskEngine, ScratchFile, ScratchFolder
from .step import check_disk_state
from .stores import BufferQueue, BufferRing, DiskStore, DiskValues, HostStore, HostValues
from .transfer import HostLink

if TYPE_CHECKING:
    from ..config.schema import Config


# -- manager ----------------------------------------------------------------------------------------


class Tier(Enum):
    """Names a kind of memory that shards are kept in."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Holds what the config says about offload; sizes in elements of a rank's shards."""

    optimizer: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    optimizer_path: str | None = None
    parameters_path: str | None = None
    pin: bool = True
    pinned_budget_bytes: int | None = None
    ratio: float = 1.0
    """Sets the share of the optimizer state that is kept off the device; the last units stay there."""
    max_in_cpu_numel: int = 0
    """Sets, with parameters on disk, how many elements stay in host memory."""
    buffer_count: int = 4
    """Counts the tiles in memory at once while they are updated."""
    tile_numel: int = TILE_NUMEL
    block_bytes: int = 1 << 20
    threads: int = 4
    state_count: int = 2
    """Counts the tensors that the optimizer keeps for each element."""
    narrow_masters: bool = False
    """Tells that master values have the compute dtype."""

    @property
    def any(self) -> bool:
        """Tell whether any state is kept off the device."""
        return self.optimizer is not Tier.DEVICE or self.parameters is not Tier.DEVICE

    @property
    def disk(self) -> bool:
        """Tell whether any state is kept on disk."""
        return Tier.DISK in (self.optimizer, self.parameters)


def _give_freed_memory_back() -> None:
    """Tell glibc to map every large block by itself, so that freeing it returns its memory to the system.

    By default its threshold grows with the blocks that are freed, and a model whose parameters come and go
    leaves several times its size behind. Has an effect only under glibc.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    except (OSError, AttributeError):
        return


_M_MMAP_THRESHOLD = -3
WRITES_BEHIND = 4
"""Sets how many writes of values to disk may be under way."""
_UPLOADS = 2
"""Sets how many tiles of new values may be on their way to the device."""


class Offload:
    """Makes the stores of an engine's shards on the device, in host memory and on disk, as the options say.

    Raises DiskError where ``nvme_path`` cannot be used.
    """

    def __init__(self, options: OffloadOptions, comm: Comm) -> None:
        self.options = options
        self.comm = comm
        self.link = HostLink(comm.device, pin=options.pin, budget_bytes=options.pinned_budget_bytes)
        self.folders: list[ScratchFolder] = []
        self.engine: DiskEngine | None = None
        self.state_file: ScratchFile | None = None
        self.value_file: ScratchFile | None = None
        self.ring = BufferRing(self.link, options.buffer_count)
        self._behind = BufferQueue(self.link, WRITES_BEHIND)
        self._uploads = BufferQueue(self.link, _UPLOADS)
        if options.parameters is not Tier.DEVICE:
            _give_freed_memory_back()
        if options.disk:
            self.engine = DiskEngine(block_bytes=options.block_bytes, threads=options.threads)
        if options.optimizer is Tier.DISK:
            self.state_file = self._file(options.optimizer_path, "optimizer.bin")
        if options.parameters is Tier.DISK:
            self.value_file = self._file(options.parameters_path, "parameters.bin")
        self._values_in_host = 0
        self._leaving = 0

    def _file(self, path: str | None, name: str) -> ScratchFile:
        assert path is not None
        # One folder and lock for a path, also if states and parameters are both there.
        folder = next((f for f in self.folders if f.root.absolute() == Path(path).absolute()), None)
        if folder is None:
            folder = ScratchFolder(path, self.comm.rank)
            self.folders.append(folder)
        return ScratchFile(folder.path / name)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that were read from and written to disks so far."""
        return 0 if self.engine is None else self.engine.read_bytes + self.engine.written_bytes

    def expect(self, numel: int) -> None:
        """Set the number of trainable elements: ``options.ratio`` of them are kept off the device."""
        self._leaving = round(numel * self.options.ratio)

    def make(self, values: Tensor, facts: ShardFacts) -> tuple[ShardStore | None, ValueStore]:
        """Make the stores of a shard."""
        facts = replace(facts, narrow_masters=self.options.narrow_masters)
        tier = Tier.DEVICE
        # Parameters that are unfrozen later are not in the share that was planned.
        if facts.trainable and (facts.is_new or self._leaving > 0):
            tier = self.options.optimizer
            self._leaving -= 0 if facts.is_new else facts.numel
        if not facts.trainable:
            return None, self._make_values(values, facts, None, tier)
        tiles = tile_ranges(values.numel(), self.options.tile_numel)
        if tier is Tier.DISK:
            assert self.engine is not None and self.state_file is not None
            kept = self._make_values(values, facts, None, tier)
            return DiskStore(
                values.to(facts.master_dtype),
                kept,
                facts.dtype,
                facts.cuts,
                tiles,
                state_room=self.options.state_count,
                engine=self.engine,
                file=self.state_file,
                ring=self.ring,
                link=self.link,
            ), kept
        if tier is Tier.HOST:
            master = self._empty(values.numel(), facts.master_dtype).copy_(values)
            kept = self._make_values(values, facts, master, tier)
            return HostStore(self.link, self._uploads, master, kept, facts.dtype, facts.cuts, tiles), kept
        master = master_on_device(values, facts)
        kept = self._make_values(values, facts, master, tier)
        return DeviceStore(master, kept, facts.cuts), kept

    def _make_values(
        self, values: Tensor, facts: ShardFacts, master: Tensor | None, master_tier: Tier
    ) -> ValueStore:
        """Make the store that gathers read: the master itself, where that is possible."""
        if facts.in_unit is not None:
            return DeviceValues(facts.in_unit, self._upload)
        tier = self._values_tier(values.numel())
        # The master itself: a step then needs no copy for the gathers.
        if master is not None and master_tier is tier is Tier.DEVICE:
            return DeviceValues(master)
        if master is not None and master_tier is tier and master.dtype == facts.dtype:
            return HostValues(self.link, master)
        if tier is Tier.DISK:
            assert self.engine is not None and self.value_file is not None
            narrow = values.to(facts.dtype)
            return DiskValues(
                narrow, engine=self.engine, file=self.value_file, behind=self._behind, link=self.link
            )
        if tier is Tier.HOST:
            return HostValues(self.link, self._empty(values.numel(), facts.dtype).copy_(values))
        return DeviceValues(values_on_device(values, facts), self._upload)

    def _upload(self, source: Tensor, target: Tensor, after: torch.cuda.Event | None) -> Pending:
        return self.link.upload(source, target, after)

    def _values_tier(self, numel: int) -> Tier:
        """Choose where a further ``numel`` elements of sharded parameters are kept."""
        if self.options.parameters is not Tier.DISK:
            return self.options.parameters
        if self._values_in_host + numel <= self.options.max_in_cpu_numel:
            self._values_in_host += numel
            return Tier.HOST
        return Tier.DISK

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return flat host memory that stays; gathers between CPU ranks may send from it."""
        if self.comm.shared:
            return self.comm.empty(numel, dtype)
        return self.link.empty(numel, dtype)

    def close(self) -> None:
        """End the disk's threads and remove the folders."""
        # The threads first: they use the buffers, the files and the folders that are released below.
        if self.engine is not None:
            self.engine.close()
        self.link.close()
        for file in (self.state_file, self.value_file):
            if file is not None:
                file.close()
        for folder in self.folders:
            folder.remove()


# -- options ----------------------------------------------------------------------------------------
#
# Builds OffloadOptions from the config.


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def _nvme_path(section: str, device: str, given: str | None) -> str | None:
    """Return the folder that a section names on the drive, with the values of variables, such as $TMPDIR.

    It stays as it is written where there is such a folder, and where nothing is offloaded to it.

    Raises ConfigError for a variable that is not set, or empty: its folder would be made in the working
    folder, which nodes may share, or in the root.
    """
    if given is None or device != "nvme":
        return given
    path = os.path.expanduser(given)
    if os.path.isdir(path):
        return path

    def value(found: re.Match[str]) -> str:
        variable = found[1] or found[2]
        known = os.environ.get(variable)
        if known:
            return known
        state = "has no variable" if known is None else "has an empty"
        where = f"zero_optimization.{section}.nvme_path"
        raise ConfigError([f"{where}: {given}: the worker's environment {state} {variable}"])

    return _VARIABLE.sub(value, path)


def offload_options(config: Config, state_count: int) -> OffloadOptions:
    """Build OffloadOptions; ``state_count`` is how many tensors the optimizer keeps for each element."""
    zero = config.zero_optimization
    aio = config.aio
    optimizer = zero.offload_optimizer or OffloadOptimizer()
    parameters = zero.offload_param or OffloadParam()
    return OffloadOptions(
        optimizer=Tier(optimizer.device),
        parameters=Tier(parameters.device),
        optimizer_path=_nvme_path("offload_optimizer", optimizer.device, optimizer.nvme_path),
        parameters_path=_nvme_path("offload_param", parameters.device, parameters.nvme_path),
        pin=all(section.pin_memory for section in (optimizer, parameters) if section.device != "none"),
        ratio=float(optimizer.ratio),
        max_in_cpu_numel=int(parameters.max_in_cpu),
        buffer_count=int(optimizer.buffer_count),
        tile_numel=min(int(zero.sub_group_size), TILE_NUMEL),
        block_bytes=int(aio.block_size),
        # A thread has one request under way, so DeepSpeed's queue depth is a number of threads here.
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
            # The file reserves room for a fixed number of states, before the first step has made any.
            counts = [_count_elementwise_states(optimizer, index, on_disk=True) for index in groups]
            states = max([0, *counts])
        except ValueError as error:
            raise ConfigError([f"{effective.loaded.origin}: {error}"]) from None
    return offload_options(effective.config, states)


def mean_state_count(optimizer: torch.optim.Optimizer | None, numel_of: Callable[[Tensor], int]) -> float:
    """Count the tensors that an optimizer keeps for an element, in the mean over its parameters. Where a
    trial step fails, or might change a class that is not known, they are as many as :func:`state_count` says.
    """
    most = state_count(optimizer)
    kind = collective_step_of(optimizer)
    if optimizer is None or (kind is None and not steps_elements(optimizer)):
        return most
    total = 0.0
    numel = 0
    for index, group in enumerate(optimizer.param_groups):
        own = sum(numel_of(parameter) for parameter in group["params"])
        try:
            count = _count_elementwise_states(optimizer, index) if kind is None else kind.group_states(group)
        except ValueError:  # it is no plan's business to say what is wrong
            count = most
        total = total + count * own
        numel = numel + own
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


_DUMMY_NUMEL = 1 << 13
"""Is more than the 4,096 elements from which on bitsandbytes keeps state in 8 bits."""


def _count_elementwise_states(optimizer: torch.optim.Optimizer, index: int, *, on_disk: bool = False) -> int:
    """Count the tensors that the optimizer keeps per element of a param group, by letting it make one step
    on a dummy. Raises ValueError if it cannot, and with ``on_disk`` for state that files cannot keep.
    """
    rule = UpdateRule(optimizer)
    try:
        leaf = torch.zeros(_DUMMY_NUMEL, requires_grad=True)
        state: State = defaultdict(dict)
        for key, value in _begun(optimizer, index).items():
            state[leaf][key] = torch.zeros_like(leaf) if value.dim() else value.clone()
        rule.begin(1.0)
        with torch.no_grad():
            rule.apply([SliceUpdate(index, leaf, torch.zeros_like(leaf))], state)
        if on_disk:
            check_disk_state(type(optimizer).__name__, state[leaf], leaf)
        return sum(is_elementwise(value, leaf) for value in state[leaf].values())
    except OptimizerError:
        raise
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
    path = _nvme_path("offload_param", device, section.nvme_path) if section is not None else None
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
