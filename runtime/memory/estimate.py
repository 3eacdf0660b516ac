"""Estimate what a rank holds in which memory, whether it fits, and what to change if not.

The sums count parameters, gradients, optimizer state and the buffers of this runtime, from the sizes of
blocks; not activations, which depend on the model's code. They follow the paper on ZeRO (Rajbhandari et al.,
2020, section 3.1), with this runtime's dtypes and units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ...cuda_ops.narrow_state import STATE_BYTES
from ..errors import MemoryPlanError
from ..mesh import MeshShape
from ..offload.manager import WRITES_BEHIND, OffloadOptions, Tier
from ..zero.layout import TILE_NUMEL
from .activations import Activations

GIB = 2**30
_NCCL_BYTES = GIB
"""Is assumed for the buffers of one NCCL communicator, which CUDA allocates and not torch."""
_UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_BUCKETS = 3
"""Transient gradient buckets: two being reduced, one being filled."""
_ACCUMULATE_BYTES = 4
_HINT = "Or use more GPUs (stages 1 to 3) or a smaller model"


@dataclass(frozen=True, slots=True)
class Amounts:
    """Holds the bytes of one rank. ``pinned`` is the page-locked part of ``host``."""

    device: int = 0
    host: int = 0
    pinned: int = 0
    disk: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.device + other.device,
            self.host + other.host,
            self.pinned + other.pinned,
            self.disk + other.disk,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Holds what decides the amounts; sizes in elements."""

    stage: int
    world_size: int
    blocks: Sequence[int]
    """Trainable elements of each block, the root block first."""
    frozen_blocks: Sequence[int] = ()
    """Elements of each block that no optimizer updates, in the same order; the last blocks may have none."""
    dtype_bytes: int
    """Bytes of a parameter's element while it computes."""
    states: float
    """Tensors the optimizer keeps for each element, in the mean."""
    offload: OffloadOptions
    master_bytes: int = _ACCUMULATE_BYTES
    """Bytes of a master value; where that is ``dtype_bytes``, masters are the parameters below stage 3."""
    state_bytes: float = _ACCUMULATE_BYTES
    """Bytes of a state's element, its part of a block's scale included."""
    grad_bytes: int = _ACCUMULATE_BYTES
    """Bytes of a gradient's element at rest."""
    trains: bool = True
    accumulates: bool = False
    """Tells whether a step has several micro-batches."""
    device_is_host: bool = False
    snapshots: int = 0
    """Counts the copies in host memory that checkpoints are written from."""
    kept_snapshots: int = 0
    """Counts the copies that ``checkpoint.in_memory`` keeps, and takes for the next ones."""
    copy_shards: int = 0
    """Counts the parts of a second copy of stage 3's parameters, of which a rank keeps one; 0 without one."""
    kept_for_links: int = 0
    """Counts the bytes that a rank keeps to send gradients packed."""
    experts: int = 0
    """Trainable elements of experts that only some ranks have: they are sharded over ``expert_shards``."""
    expert_shards: int = 1
    steps_in_backward: bool = False
    """Tells whether units are stepped, and their gradients freed, inside the backward pass."""
    can_step_in_backward: bool = False
    """Tells whether a stage and a key would make them so."""
    can_narrow: bool = False
    """Tells whether the optimizer's state may have fewer than 32 bits an element."""
    is_bf16: bool = False
    prefetch_numel: int = 50_000_000
    """Stage 3: elements that are gathered ahead, at least one block's; the default is the config's."""
    freed_by_backward: int = 0
    """Bytes of activations that are freed before a third gradient bucket is filled, where they are known."""

    @property
    def trainable(self) -> int:
        return sum(self.blocks)

    @property
    def frozen(self) -> int:
        return sum(self.frozen_blocks)

    @property
    def gathered(self) -> list[int]:
        """Return the elements of each block as stage 3 gathers it, the frozen ones included."""
        return [own + frozen for own, frozen in zip_longest(self.blocks, self.frozen_blocks, fillvalue=0)]

    @property
    def part(self) -> int:
        """Return this rank's part of the trainable elements, where they are sharded."""
        rest = self.trainable - self.experts
        return -(-rest // self.world_size) + -(-self.experts // self.expert_shards)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Holds the bytes of a rank by purpose."""

    parameters: Amounts
    gradients: Amounts
    optimizer: Amounts
    snapshot: Amounts = Amounts()

    @property
    def total(self) -> Amounts:
        return self.parameters + self.gradients + self.optimizer + self.snapshot


def plan(s: Setting) -> MemoryPlan:
    """Estimate what a rank holds between and during steps, without activations."""
    own = s.part if s.stage >= 1 else s.trainable
    away = own if s.offload.optimizer is not Tier.DEVICE else 0
    away = round(away * s.offload.ratio) if s.trains else 0
    here = (own if s.trains else 0) - away
    return MemoryPlan(
        _parameters(s), _gradients(s, here, away), _optimizer(s, here, away), _snapshot(s, away)
    )


def nccl_bytes(mesh: MeshShape, *, has_shard_groups: bool = False) -> int:
    """Estimate what NCCL takes of a GPU's memory for its own buffers, from the first collective on.

    There are two communicators for the data-parallel ranks (one gathers while the other reduces), two more
    for expert parallelism, two more with ``has_shard_groups`` (units sharded over some of the ranks), and one
    for each further axis. The size of one is assumed, not measured.
    """
    if mesh.ranks == 1:
        return 0
    pairs = 1 + (mesh.expert > 1) + has_shard_groups
    others = [name for name in mesh.axes if name != "data"]
    return (2 * pairs + len(others)) * _NCCL_BYTES


def peak(s: Setting, present: Amounts) -> Amounts:
    """Estimate the most that a rank holds at one time, without activations: between steps, or while
    ``initialize`` takes over a model that takes ``present`` now.

    Units are taken over one by one: the old values shrink as the new ones grow, with one unit in two dtypes
    besides.
    """
    found = plan(s)
    own = (s.part if s.stage >= 1 else s.trainable) if s.trains else 0
    away = round(own * s.offload.ratio) if s.offload.optimizer is not Tier.DEVICE else 0
    alias = s.dtype_bytes == s.master_bytes and s.stage < 3
    masters = 0 if alias else (own - away) * s.master_bytes
    made = found.parameters.device + masters
    largest = max(s.gathered, default=0)
    start = max(present.device, made) + largest * (_ACCUMULATE_BYTES + s.dtype_bytes)
    total = found.total
    return replace(total, device=max(total.device, start), host=max(total.host, present.host))


def _snapshot(s: Setting, away: int) -> Amounts:
    """Estimate a snapshot's bytes: this rank's part of masters and state, without what is on disk."""
    if not s.snapshots + s.kept_snapshots:
        return Amounts()
    written = s.part
    if s.offload.optimizer is Tier.DISK:
        written = max(0, written - away)
    frozen = -(-s.frozen // s.world_size) if s.offload.parameters is not Tier.DISK else 0
    nbytes = round(written * (1 + s.states) * _ACCUMULATE_BYTES) + frozen * s.dtype_bytes
    here = _of_tier(Tier.HOST, nbytes * s.snapshots, not s.device_is_host)
    return here + _of_tier(Tier.HOST, nbytes * s.kept_snapshots, pin=False)


def _of_tier(tier: Tier, nbytes: int, pin: bool) -> Amounts:
    if tier is Tier.DEVICE:
        return Amounts(device=nbytes)
    if tier is Tier.HOST:
        return Amounts(host=nbytes, pinned=nbytes if pin else 0)
    return Amounts(disk=nbytes)


def _most_gathered(blocks: Sequence[int], prefetch_numel: int) -> int:
    """Return the most elements that are gathered at one time: a block in use and those that follow it,
    forward or backward. At least two of the largest, which may be used in another order.
    """
    most = 2 * max(blocks, default=0)
    for order in (blocks, blocks[::-1]):
        ahead = 0
        stop = 1
        for first, own in enumerate(order):
            if first:
                ahead -= own  # it was ahead of the block before
            while stop < len(order) and (stop == first + 1 or ahead < prefetch_numel):
                ahead += order[stop]
                stop += 1
            most = max(most, own + ahead)
    return most


def _parameters(s: Setting) -> Amounts:
    everything = s.trainable + s.frozen
    if s.stage < 3:
        return Amounts(device=everything * s.dtype_bytes)
    root, *others = s.gathered or [0]
    rest = [block for block in others if block]
    copied = -(-everything // s.copy_shards) if s.copy_shards else 0
    gathered = Amounts(device=(root + _most_gathered(rest, s.prefetch_numel) + copied) * s.dtype_bytes)
    own_frozen = -(-s.frozen // s.world_size)
    own = s.part
    if s.trains and s.offload.parameters is s.offload.optimizer is Tier.DEVICE:
        own = 0  # the masters serve
    elif (
        s.trains
        and s.offload.parameters is s.offload.optimizer is Tier.HOST
        and s.dtype_bytes == s.master_bytes
    ):
        own = 0
    at_rest = own + own_frozen
    if s.offload.parameters is not Tier.DISK:
        return gathered + _of_tier(s.offload.parameters, at_rest * s.dtype_bytes, s.offload.pin)
    in_host = min(at_rest, s.offload.max_in_cpu_numel)
    reading = (_most_gathered(rest, s.prefetch_numel) if rest else 2 * root) // s.world_size
    writing = WRITES_BEHIND * min(TILE_NUMEL, at_rest)
    return (
        gathered
        + _of_tier(Tier.HOST, (in_host + reading + writing) * s.dtype_bytes, s.offload.pin)
        + _of_tier(Tier.DISK, (at_rest - in_host) * s.dtype_bytes, False)
    )


def _gradients(s: Setting, here: int, away: int) -> Amounts:
    if not s.trains:
        return Amounts()
    if s.stage < 2:
        sums = Amounts(device=s.trainable * s.grad_bytes)
    else:
        *others, largest = (numel * s.dtype_bytes for numel in sorted([0, *s.blocks])[-_BUCKETS:])
        buckets = largest + max(0, sum(others) - s.freed_by_backward)
        if s.steps_in_backward:  # those that are being reduced
            here = min(here, sum(-(-numel // s.world_size) for numel in sorted(s.blocks)[1 - _BUCKETS :]))
        sums = Amounts(device=buckets + here * s.grad_bytes)
    sums += Amounts(device=s.kept_for_links)
    if s.offload.optimizer is Tier.HOST:
        landing = s.dtype_bytes + (s.grad_bytes if s.accumulates else 0)
        sums += _of_tier(Tier.HOST, away * landing, s.offload.pin)
    elif s.offload.optimizer is Tier.DISK:
        sums += Amounts(disk=away * _ACCUMULATE_BYTES)
    return sums


def _optimizer(s: Setting, here: int, away: int) -> Amounts:
    alias = s.dtype_bytes == s.master_bytes and s.stage < 3
    states = s.states * s.state_bytes
    result = Amounts(device=round(here * (states + (0 if alias else s.master_bytes))))
    nbytes = round(away * (states + s.master_bytes))
    if s.offload.optimizer is Tier.HOST:
        masters = away * s.master_bytes
        return result + Amounts(host=nbytes, pinned=masters if s.offload.pin else 0)
    if s.offload.optimizer is Tier.DISK:
        tile = min(s.offload.tile_numel, away) * (s.offload.state_count + 3) * _ACCUMULATE_BYTES
        ring = s.offload.buffer_count * tile
        nbytes = away * (s.offload.state_count + 1) * _ACCUMULATE_BYTES
        return result + Amounts(disk=nbytes) + _of_tier(Tier.HOST, ring, s.offload.pin)
    return result


# -- does it fit


def shortages(s: Setting, free: Amounts, parameters_disk: int | None = None) -> list[str]:
    """List what is not enough, in words. ``free`` is what one rank may take. ``parameters_disk`` is what the
    parameters' drive has where it is another than the optimizer's; ``free.disk`` is the optimizer's then.
    """
    parts = plan(s)
    need = parts.total
    if s.device_is_host:
        amounts = [("host memory", need.device + need.host, free.host)]
    else:
        amounts = [("GPU memory", need.device, free.device), ("host memory", need.host, free.host)]
    if s.offload.disk and parameters_disk is None:
        amounts.append(("disk", need.disk, free.disk))
    elif s.offload.disk and parameters_disk is not None:
        values = parts.parameters.disk
        amounts += [("disk", need.disk - values, free.disk), ("disk", values, parameters_disk)]
    return [
        f"{what} ({shown_bytes(needed)} needed, {shown_bytes(there)} free)"
        for what, needed, there in amounts
        if needed > there
    ]


def alternatives(s: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield changes of the config, the cheapest first, each with the setting that it leads to."""
    for stage in range(s.stage + 1, 4):
        if s.world_size > 1:
            yield f'"stage": {stage}', replace(s, stage=stage)
    if s.can_step_in_backward and s.offload.optimizer is Tier.DEVICE:
        for stage in sorted({max(2, s.stage), 3}):
            changed = f'"stage": {stage}, ' if stage != s.stage else ""
            yield f'{changed}"step_in_backward": true', replace(s, stage=stage, steps_in_backward=True)
    for stage in sorted({max(1, s.stage), 3}):
        changed = f'"stage": {stage}, ' if stage != s.stage else ""
        host = replace(s.offload, optimizer=Tier.HOST)
        if s.offload.optimizer is Tier.DEVICE and not s.device_is_host:
            text = f'{changed}"offload_optimizer": {{"device": "cpu"}}'
            yield text, replace(s, stage=stage, offload=host)
            if stage == 3:
                both = replace(host, parameters=Tier.HOST)
                yield f'{text}, "offload_param": {{"device": "cpu"}}', replace(s, stage=3, offload=both)
        nvme = f'{changed}"offload_optimizer": {{"device": "nvme", "nvme_path": "..."}}'
        if s.offload.narrow_masters or s.state_bytes < _ACCUMULATE_BYTES:
            continue  # records on disk are fp32
        if s.offload.optimizer is not Tier.DISK:
            disk = replace(s.offload, optimizer=Tier.DISK)
            yield nvme, replace(s, stage=stage, offload=disk)
        if stage == 3 and s.offload.parameters is not Tier.DISK:
            both = replace(s.offload, optimizer=Tier.DISK, parameters=Tier.DISK, max_in_cpu_numel=0)
            text = f'{nvme}, "offload_param": {{"device": "nvme", "nvme_path": "...", "max_in_cpu": 0}}'
            yield text, replace(s, stage=3, offload=both)


def narrowed(s: Setting) -> Iterator[tuple[dict[str, Any], Setting]]:
    """Yield changes of the config that keep numbers in fewer bits, with the settings that they lead to."""
    if not s.can_narrow or s.offload.optimizer is Tier.DISK:
        return
    state = replace(s, state_bytes=min(s.state_bytes, STATE_BYTES["int8"]))
    change: dict[str, Any] = {"optimizer": {"params": {"state_dtype": "int8"}}} if state != s else {}
    if change:
        yield change, state
    if s.is_bf16 and s.master_bytes > s.dtype_bytes:
        grad_bytes = s.grad_bytes if s.accumulates else s.dtype_bytes
        offload = replace(s.offload, narrow_masters=True)
        both = replace(state, master_bytes=s.dtype_bytes, grad_bytes=grad_bytes, offload=offload)
        yield {**change, "bf16": {"master_weights": "stochastic"}}, both


def check(s: Setting, free: Amounts, parameters_disk: int | None = None) -> None:
    """Raise MemoryPlanError, with the first alternative that fits, if the plan does not fit."""
    missing = shortages(s, free, parameters_disk)
    if not missing:
        return
    advice = f"No setting of zero_optimization makes it fit. {_HINT}"
    lean = replace(s, snapshots=0, kept_snapshots=0)
    if s.snapshots and not shortages(lean, free, parameters_disk):
        off = '"in_memory": null' if s.kept_snapshots else '"asynchronous": false'
        advice = f'This would fit: "checkpoint": {{{off}}}.'
    if shortages(lean, free, parameters_disk):
        for change, setting in alternatives(s):
            left = shortages(setting, replace(free, disk=free.disk or 1 << 62))
            if not left:
                need = plan(setting).total
                on_disk = f" (needs {shown_bytes(need.disk)} free disk per rank)" if need.disk else ""
                advice = f"This would fit: in zero_optimization, {change}{on_disk}. {_HINT}"
                break
    for change_of_bits, setting in narrowed(lean):
        if not shortages(setting, free, parameters_disk):
            advice += f". Or use narrower optimizer state: {json.dumps(change_of_bits)[1:-1]}"
            advice += " (if the script builds the optimizer, set state_dtype in its param groups)"
            break
    raise MemoryPlanError(f"the model does not fit: {' and '.join(missing)} per rank. {advice}")


def describe(s: Setting, free: Amounts, present: Amounts, of_token: Activations | None = None) -> list[str]:
    """Describe the plan: a line with the most important amounts, then lines of details. ``present`` is what
    the model takes before ``initialize``, ``of_token`` what a token's activations take, where known.
    """
    found = plan(s)
    total = found.total
    most = peak(s, present)
    parts = (found.parameters.device, found.gradients.device, found.optimizer.device)
    unit, shown, *each = _in_one_unit(total.device, *parts, most.device)
    of = "" if s.device_is_host else "GPU "
    left = max(0, free.host - total.device - total.host if s.device_is_host else free.device - total.device)
    away = total.host - found.snapshot.host
    offloaded = f", {shown_bytes(away + total.disk)} offloaded" if away or total.disk else ""
    details = []
    if each[3] != shown:
        details.append(f"{of}memory per rank during initialize: {each[3]} {unit}")
    if offloaded:
        pinned = 0 if s.device_is_host else total.pinned - found.snapshot.pinned
        most_away = max(away, present.host)
        away_unit, host, locked, start, disk = _in_one_unit(away, pinned, most_away, total.disk)
        notes = [f"{locked} page-locked"] * (pinned > 0) + [f"{start} during initialize"] * (start != host)
        places = [f"{host} {away_unit} in host memory" + (f" ({', '.join(notes)})" if notes else "")]
        details.append(f"offloaded: {', '.join(places + [f'{disk} {away_unit} on disk'] * (total.disk > 0))}")
    if found.snapshot.host:
        what = "snapshots" if s.kept_snapshots else "asynchronous checkpoints"
        details.append(f"{what}: {shown_bytes(found.snapshot.host)} of host memory")
    if of_token is not None and of_token.checkpointed is not None:
        details.append(
            f"activations: {shown_bytes(left)} fits a micro-batch of {_rounded(left // of_token.plain)} "
            f"tokens, or {_rounded(left // of_token.checkpointed)} with activation checkpointing in every "
            f"block (estimate: {of_token.source})"
        )
    summary = (
        f"{of}memory per rank: {shown} {unit} (parameters {each[0]}, gradients {each[1]}, optimizer "
        f"{each[2]}){offloaded}, {shown_bytes(left)} left for activations"
    )
    return [summary, *details]


def _rounded(count: int) -> str:
    """Write a number in two digits and zeros: more is not known of an estimate."""
    places = max(0, len(str(count)) - 2)
    return f"{count // 10**places * 10**places:,}"


def _in_one_unit(*amounts: int) -> list[str]:
    """Return the unit that fits the largest amount, and all amounts in it."""
    power, unit = next((each for each in _UNITS if max(amounts) >= each[0]), _UNITS[-1])
    tiny = 0.05 * power
    return [unit, *("<0.1" if 0 < amount < tiny else f"{amount / power:.1f}" for amount in amounts)]


def shown_bytes(nbytes: int) -> str:
    """Write a number of bytes with a unit that fits."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 10 * 2**20 else f"{nbytes / 2**10:.0f} KiB"
