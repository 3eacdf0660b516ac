"""Predicts the least time of a training step from a model's sizes and measured speeds.

A step has phases. In a phase computation and every kind of traffic are taken to overlap perfectly, so that it
takes as long as the slowest of them: the result is a lower bound, and what bounds it is known.

- Computation: 2 operations for each parameter and token in the forward pass and 4 in the backward pass
  (Kaplan et al., 2020, section 2.1), 2 more for those of checkpointed blocks; attention adds 4 * sequence *
  width for each layer and token, and the backward pass has twice as much (Narayanan et al., 2021, equation 3:
  96 B s l h^2 (1 + s / 6h + V / 16lh), with every layer checkpointed). Of a module the operations are counted
  instead (``step_time.py``).
- Between ranks: 2N elements a step at stages 0 to 2, 3N at stage 3 (Rajbhandari et al., 2020, section 7),
  each times (w - 1) / w, as of a ring of w ranks; bus bandwidth is defined so (nccl-tests,
  doc/PERFORMANCE.md). The gathers after a step at stages 1 and 2 overlap with the next forward pass, as in
  this runtime.
- Offload: bytes over bandwidths, placed as ``choices.py`` does. A step in host memory reads and writes each
  state once; a GPU's link goes both ways at once, while a drive's reads and writes add up.
- A step on the GPU is left out: 16 to 32 bytes a parameter over terabytes a second are some milliseconds for
  a billion parameters of a rank, and zlaunch does not measure that bandwidth. A lower bound remains one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ..errors import MemoryPlanError
from ..offload.manager import Tier
from .choices import Choice, Machines
from .fake_step import fake_inputs, loss_of, on_fake_tensors, parse_shape
from .model import ModelSizes

# -- simulate ---------------------------------------------------------------------------------------


_MASTER_BYTES = 4
_STATE_BYTES = 3 * _MASTER_BYTES
"""Counts an element's master value and Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Holds measured speeds: operations or bytes per second; None where one is not known."""

    compute: float | None = None
    """Is what the matrix products of a GPU reach, in the dtype of the model."""
    link: float | None = None
    """Is the bus bandwidth of a rank's collectives."""
    host_link: float | None = None
    """Is that between a GPU and host memory, in each direction."""
    host_memory: float | None = None
    """Is that of a machine's memory, for all of its ranks together."""
    nvme_read: float | None = None
    """Is that of a machine, for all of its ranks together, as the next one."""
    nvme_write: float | None = None


OPTIONS = {
    "compute": "--tflops",
    "link": "--link",
    "host_link": "--host_link",
    "host_memory": "--host_bandwidth",
    "nvme_read": "--nvme_read",
    "nvme_write": "--nvme_write",
}
"""Names the option of `zlaunch estimate` for each speed."""
BOUNDS = {
    "compute": "compute",
    "link": "link",
    "host_link": "host link",
    "host_memory": "CPU",
    "nvme": "NVMe",
}
"""Names what may bound a step."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Holds what a rank computes in a step: operations, and samples or tokens."""

    forward: float
    backward: float
    recomputed: float | None
    """Counts what checkpointed blocks compute once more; None where nothing can be checkpointed."""
    units: int
    """Counts the tokens, or the samples, of a rank's micro-batch."""
    unit: str = "tokens"


def work_of_numbers(model: ModelSizes, sequence: int, micro_batch: int) -> Operations:
    """Count the operations of a transformer by the formulas above."""
    tokens = sequence * micro_batch
    attention = 4 * sequence * (model.hidden or 0) * (model.layers or 0)
    forward = float(tokens * (2 * model.numel + attention))
    backward = 2.0 * forward - 2 * tokens * model.frozen
    again = float(tokens * (2 * sum(model.blocks[1:]) + attention))
    return Operations(forward, backward, again, tokens)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Holds the least time of a step, or which speeds are not known."""

    seconds: float | None
    bound: str | None
    """Names what the step waits for longest."""
    missing: tuple[str, ...] = ()
    """Names the fields of Speeds that are needed besides."""

    def rate(self, work: Operations, ranks: int) -> float | None:
        """Return the tokens or samples of all ranks in a second."""
        return work.units * ranks / self.seconds if self.seconds else None

    def cells(self, work: Operations, ranks: int) -> list[str]:
        """Return a table's cells: seconds, tokens or samples in a second, and what bounds the step."""
        rate = self.rate(work, ranks)
        if self.seconds is None or rate is None:
            return ["?", "?", "?"]
        return [f"{self.seconds:.3g}", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", self.bound or "?"]

    def as_dict(self, work: Operations, ranks: int) -> dict[str, Any]:
        """Return what JSON has of it."""
        step = {"seconds": self.seconds, f"{work.unit}_per_s": self.rate(work, ranks), "bound_by": self.bound}
        return {"step": {**step, "missing": [OPTIONS[name] for name in self.missing]}}


def step_time(
    model: ModelSizes, machines: Machines, choice: Choice, work: Operations, speeds: Speeds, dtype_bytes: int
) -> StepTime:
    """Predict the least time of a step with one micro-batch. See the module for the formulas."""
    phases = list(_phases(model, machines, choice, work, dtype_bytes))
    needed = {name for phase in phases for name, amount in phase.items() if amount > 0}
    missing = tuple(f.name for f in fields(Speeds) if f.name in needed and getattr(speeds, f.name) is None)
    if missing:
        return StepTime(None, None, missing)
    total = 0.0
    waits = dict.fromkeys(BOUNDS, 0.0)
    for phase in phases:
        taken = dict.fromkeys(BOUNDS, 0.0)
        for name, amount in phase.items():
            if amount > 0:
                taken["nvme" if name.startswith("nvme") else name] += amount / getattr(speeds, name)
        slowest = max(taken, key=lambda name: taken[name])
        total += taken[slowest]
        waits[slowest] += taken[slowest]
    return StepTime(total, BOUNDS[max(waits, key=lambda name: waits[name])])


def _phases(
    model: ModelSizes, machines: Machines, choice: Choice, work: Operations, dtype_bytes: int
) -> Iterator[dict[str, float]]:
    """Yield what each phase asks of what, by the fields of Speeds: operations of a rank, bytes of a rank
    on the links, bytes of a machine in its memory and on its drives.
    """
    ranks = machines.world_size
    gpus = machines.gpus
    trainable = sum(model.blocks)
    everything = model.numel
    ring = dtype_bytes * (ranks - 1) / ranks
    own = trainable / ranks if choice.stage >= 1 else float(trainable)
    values = everything / ranks * dtype_bytes
    """Counts the bytes of a rank's parameters where they are sharded."""
    away = choice.optimizer is not Tier.DEVICE
    on_disk = choice.optimizer is Tier.DISK

    forward, backward, step = (dict.fromkeys(OPTIONS, 0.0) for _ in range(3))
    forward["compute"] = work.forward
    backward["compute"] = work.backward + (work.recomputed or 0.0 if choice.checkpointed else 0.0)
    if choice.stage == 3:
        forward["link"] = everything * ring
        backward["link"] = (everything + trainable) * ring
    else:
        backward["link"] = trainable * ring * (2 if choice.stage == 0 else 1)
        forward["link"] = 0.0 if choice.stage == 0 else trainable * ring
    if choice.parameters is not Tier.DEVICE:
        for phase in (forward, backward):
            phase["host_link"] = values
            phase["nvme_read"] = values * gpus if choice.parameters is Tier.DISK else 0.0
        step["nvme_write"] = own * dtype_bytes * gpus if choice.parameters is Tier.DISK else 0.0
    if away:  # gradients leave beside the backward pass; values come back, or are read by the next pass
        backward["host_link"] = max(backward["host_link"], own * dtype_bytes)
        step["host_link"] = 0.0 if choice.parameters is not Tier.DEVICE else own * dtype_bytes
        step["host_memory"] = own * gpus * (2 * _STATE_BYTES + 2 * dtype_bytes)
    if on_disk:
        backward["nvme_write"] += own * gpus * _MASTER_BYTES
        step["nvme_read"] += own * gpus * (_STATE_BYTES + _MASTER_BYTES)
        step["nvme_write"] += own * gpus * _STATE_BYTES
    if away and (choice.stage == 3 or ranks == 1):  # the next forward pass waits for each block by itself
        yield {name: forward[name] + step[name] for name in OPTIONS}
        yield backward
        return
    yield from (forward, backward, step)


def speeds_of_reports(reports: dict[str, Any]) -> Speeds:
    """Read speeds from what `zlaunch bench net --json` and `bench io --json` have printed, by files' names.
    The slowest collective of the most ranks counts, and the drive's best block size. Raises MemoryPlanError.
    """
    found: dict[str, float] = {}
    for name, report in reports.items():
        try:
            if "collectives" in report:
                most = max(len(each["ranks"]) for each in report["collectives"])
                wide = [each for each in report["collectives"] if len(each["ranks"]) == most]
                read = {"link": min(float(each["bus_bytes_per_s"]) for each in wide)}
            else:
                best = min(report["measured"], key=lambda each: 1 / each["read"] + 1 / each["write"])
                read = {"nvme_read": float(best["read"]), "nvme_write": float(best["write"])}
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise MemoryPlanError(
                f"{name} is not the output of `zlaunch bench net --json` or `zlaunch bench io --json`: "
                f"{error!r}"
            ) from None
        if read.keys() & found.keys():
            raise MemoryPlanError(f"{name}: another --measured file has the same speeds; pass only one")
        found |= read
    return Speeds(**found)


# -- operations -------------------------------------------------------------------------------------
#
# Counts the operations of a module's step, and the samples or tokens that it takes.


def work_of_module(
    model: ModelSizes, sequence: int, micro_batch: int, dtype: torch.dtype, shape: str | None = None
) -> Operations | None:
    """Count a module's operations by running it on fake tensors; None where its inputs are not known.
    Products of matrices and convolutions count, as torch's FlopCounterMode does. Raises MemoryPlanError.
    """
    if model.build is None or not (model.is_language_model or shape):
        return None
    inputs = None if shape is None else parse_shape(shape)

    def run(module: nn.Module) -> tuple[int, int]:
        given = fake_inputs(sequence, micro_batch, dtype, inputs)
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            loss = loss_of(module, given)
            forward = counter.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        return forward, counter.get_total_flops() - forward

    plain = on_fake_tensors(run, model, dtype, inputs, checkpointed=False)
    less = on_fake_tensors(run, model, dtype, inputs, checkpointed=True)
    assert plain is not None
    forward, backward = plain
    again = None if less is None else float(less[1] - backward)
    if inputs is None:
        return Operations(forward, backward, again, sequence * micro_batch)
    sizes, kind = inputs
    tokens = kind is torch.int64 and len(sizes) == 2
    units, unit = (math.prod(sizes), "tokens") if tokens else (sizes[0], "samples")
    return Operations(forward, backward, again, units, unit)


def _formulas() -> dict[Any, Any]:
    """Return what torch's counter lacks: the attention of a CPU, which fake tensors are on, and the products
    of experts. All get the shapes of tensors.
    """

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        count = sdpa_backward_flop_count(grad, query, key, value)  # type: ignore[no-untyped-call]
        return int(count)

    def grouped(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * int(left[-2] * left[-1] * right[-1])

    formulas = {
        "_grouped_mm": grouped,
        "_scaled_dot_product_flash_attention_for_cpu": forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
    }
    aten = torch.ops.aten
    return {getattr(aten, name): count for name, count in formulas.items() if hasattr(aten, name)}
