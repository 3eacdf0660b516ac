"""Measures what a rank can reach, so that a report can say which part of that it does reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from ..comm.collectives import Comm
from ..config import Config
from ..environment import read_environment
from ..errors import DiskError
from ..memory.estimate import Setting
from ..offload.benchmark import probe
from ..offload.manager import Offload
from ..precision import Precision, choose_precision
from ..zero import placeholder
from .reporter import StepCosts

# -- limits -----------------------------------------------------------------------------------------


_WIDTH = 512
_WIDTH_ON_GPU = 4096
_BYTES = 1 << 20
_BYTES_ON_GPU = 1 << 25
_REPEATS = 3


def measure_costs(
    model: nn.Module, comm: Comm, setting: Setting, precision: Precision, offload: Offload | None
) -> StepCosts:
    """Return what a step of an engine costs, and what this rank can reach. Collective."""
    dtype = precision.autocast or precision.dtype or torch.float32
    per_element = setting.dtype_bytes * (comm.world_size - 1) / comm.world_size
    return StepCosts(
        flops_per_token=_flops_per_token(model),
        moved_bytes=lambda: sum(comm.moved.values()) * per_element,
        disk_bytes=lambda: 0 if offload is None else offload.moved_bytes,
        limits=limits_of(comm, dtype, offload),
    )


def _flops_per_token(model: nn.Module) -> int:
    """Count 6 operations for each trained parameter and 4 for any other (Kaplan et al., 2020, table 1), but
    none for tables that are only looked up in.
    """
    used: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            used |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    return sum(
        (6 if each.requires_grad else 4) * placeholder.shape_of(each).numel() for each in used.values()
    )


def limits_of(comm: Comm, dtype: torch.dtype, offload: Offload | None) -> dict[str, float]:
    """Measure what this rank can reach, where a launcher listens to every rank. Collective. With state on a
    disk it adds ``disk_gbs``, the 1e9 bytes a second of reads and writes of equal amounts.
    """
    if not all(comm.exchange(read_environment().event_fd is not None)):
        return {}
    # where all goes through shared memory there is no link
    found = measure_limits(
        comm.device,
        dtype,
        link=comm.world_size > 1 and not (comm.shared and comm.link.size == comm.world_size),
    )
    if offload is not None and offload.folders:
        try:
            found["disk_gbs"] = probe(offload.folders[0].path, offload.options).step / 1e9
        except DiskError:  # a disk that is full ends the run with a message of its own when it is needed
            pass
    return found


def measure_limits(device: torch.device, dtype: torch.dtype, *, link: bool) -> dict[str, float]:
    """Return ``matmul_tflops``, what square matrix multiplications in ``dtype`` reach in 1e12 operations a
    second, and with ``link`` also ``link_gbs``, the bus bandwidth of an all-reduce over all ranks in 1e9
    bytes a second (nccl-tests, doc/PERFORMANCE.md). It takes some milliseconds; with ``link`` it is
    collective.
    """
    on_gpu = device.type == "cuda"
    with torch.no_grad():
        found = {"matmul_tflops": _matmul_tflops(device, dtype)}
        if link:
            buffer = torch.zeros(_BYTES_ON_GPU if on_gpu else _BYTES, dtype=torch.uint8, device=device)
            ranks = dist.get_world_size()
            bus_bytes = 2 * (ranks - 1) / ranks * buffer.nbytes
            found["link_gbs"] = bus_bytes / _best(lambda: dist.all_reduce(buffer), device) / 1e9
    return found


@cache
def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure matrix multiplications, once in a process."""
    width = _WIDTH_ON_GPU if device.type == "cuda" else _WIDTH
    # Values of all sizes: a GPU multiplies matrices of ones faster, because it draws less power. Computed,
    # not drawn, because the script's draws would be others than in a run without the engine.
    angles = torch.arange(width * width, dtype=torch.float32, device=device).view(width, width)
    one = angles.sin().to(dtype)
    other = angles.cos().to(dtype)
    return 2 * width**3 / _best(lambda: torch.mm(one, other), device) / 1e12


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few calls, after one that does much for the first time."""
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken[1:]), 1e-9)


# -- overflow hint ----------------------------------------------------------------------------------
#
# Knows why a model may overflow in fp16: it was trained in bf16, whose range is larger.


_BF16 = (torch.bfloat16, "bfloat16", "torch.bfloat16")


def find_overflow_hint(model: nn.Module, config: Config) -> str:
    """Return what to say where gradients overflow in fp16: not empty where the model's values, or the config
    of a Hugging Face model, are in bf16. Call it before the model is converted.
    """
    precision = choose_precision(config)
    if torch.float16 not in (precision.dtype, precision.autocast):
        return ""
    described = getattr(model, "config", None)
    kinds = [getattr(described, name, None) for name in ("dtype", "torch_dtype")]
    in_bf16 = any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    if not in_bf16 and not any(kind in _BF16 for kind in kinds if isinstance(kind, (str, torch.dtype))):
        return ""
    instead = '"fp16": {"enabled": false}, "bf16": {"enabled": true}'
    if precision.autocast is not None:
        instead = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
        instead += ', "amp": {"enabled": false}' if config.amp.enabled else ""
    return f"the model is in bf16, and fp16 cannot represent values above 65504. Use bf16: {instead}"
