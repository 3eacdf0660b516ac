"""Describe the configs that are tried, as changes of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True, slots=True)
class Placement:
    """Names a ZeRO stage and which states are kept in host memory."""

    stage: int
    optimizer_on_host: bool = False
    parameters_on_host: bool = False

    @property
    def name(self) -> str:
        """Return it in words."""
        parts = [f"stage {self.stage}"]
        if self.optimizer_on_host:
            what = "optimizer and parameters" if self.parameters_on_host else "optimizer"
            parts.append(f"{what} on the CPU")
        return ", ".join(parts)

    @property
    def is_offloaded(self) -> bool:
        """Tell whether anything is kept in host memory."""
        return self.optimizer_on_host or self.parameters_on_host


DEVICE_PLACEMENTS = tuple(Placement(stage) for stage in range(4))
"""The fastest first where communication counts; each next one takes less memory."""
HOST_PLACEMENTS = (Placement(2, True), Placement(3, True), Placement(3, True, True))


@dataclass(frozen=True, slots=True)
class Variant:
    """Holds what one run changes; None leaves the user's own value."""

    placement: Placement | None = None
    micro_batch: int | None = None
    bucket: int | None = None
    prefetches: bool | None = None

    @property
    def name(self) -> str:
        """Return it in words."""
        parts = [] if self.placement is None else [self.placement.name]
        parts += [] if self.micro_batch is None else [f"micro-batch {self.micro_batch}"]
        parts += [] if self.bucket is None else [f"buckets of {self.bucket / 1e6:g}M"]
        parts += [] if self.prefetches is None else ["no prefetch"]
        return ", ".join(parts) or "as it is"

    def but(self, **changes: Any) -> Variant:
        """Return the variant with changes."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Holds the batch sizes that a run has had. Their product stays: a step trains on the same samples."""

    micro: int
    accumulation: int
    world_size: int

    def micros(self) -> list[int]:
        """Return the micro-batches of the same global batch, by powers of two from the given one."""
        whole = self.micro * self.accumulation
        found = [self.micro]
        while whole % (found[-1] * 2) == 0:
            found.append(found[-1] * 2)
        while found[0] % 2 == 0:
            found.insert(0, found[0] // 2)
        return found


def change_config(raw: Mapping[str, Any], variant: Variant, batch: BatchSizes | None) -> dict[str, Any]:
    """Return the user's config with a variant's changes. ``batch`` is needed for another micro-batch."""
    changed = copy.deepcopy(dict(raw))
    zero = dict(changed.get("zero_optimization") or {})
    if variant.placement is not None:
        zero["stage"] = variant.placement.stage
        on_host = (variant.placement.optimizer_on_host, variant.placement.parameters_on_host)
        for name, wanted in zip(_OFFLOADS, on_host, strict=True):
            given = zero.pop(name, None)
            if wanted:
                kept = given if isinstance(given, dict) and given.get("device") == "cpu" else {}
                zero[name] = {**kept, "device": "cpu"}
    if variant.bucket is not None:
        zero["reduce_bucket_size"] = variant.bucket
    if variant.prefetches is False:
        zero["stage3_prefetch_bucket_size"] = 0
        zero.pop("prefetch_bucket_size", None)
    if zero:
        changed["zero_optimization"] = zero
    if variant.micro_batch is not None:
        assert batch is not None
        whole = batch.micro * batch.accumulation
        changed["train_micro_batch_size_per_gpu"] = variant.micro_batch
        changed["gradient_accumulation_steps"] = whole // variant.micro_batch
        changed["train_batch_size"] = whole * batch.world_size
    return changed


def given_placement(raw: Mapping[str, Any]) -> Placement | None:
    """Return the placement of a config; None where it is none of those that are tried."""
    zero = raw.get("zero_optimization") or {}
    if not isinstance(zero, Mapping) or not isinstance(zero.get("stage", 0), int):
        return None
    devices = []
    for name in _OFFLOADS:
        section = zero.get(name) or {}
        devices.append(section.get("device", "none") if isinstance(section, Mapping) else "?")
    if not {"none", "cpu", None} >= set(devices) or any("cpu_offload" in name for name in zero):
        return None
    return Placement(zero.get("stage", 0), devices[0] == "cpu", devices[1] == "cpu")
