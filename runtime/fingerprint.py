"""Makes numbers of tensors, where they are, that tell whether ranks or steps have the same ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .device import to_device
from .zero.tensors import tensors_in

CHUNK = 1 << 20
FACTOR = 6364136223846793005
"""Multiplies a number before another is added, so that their order counts (Knuth's MMIX generator)."""
SEED = 20_240_229
_LANES = {1: torch.uint8, 2: torch.int16}
_SAMPLED = 1 << 10


@cache
def _weights(length: int, device: torch.device) -> Tensor:
    """Return random factors for a chunk of lanes, equal on all ranks."""
    generator = torch.Generator().manual_seed(SEED)
    limits = torch.iinfo(torch.int64)
    return to_device(torch.randint(limits.min, limits.max, (length,), generator=generator), device)


def _lanes_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of 32 bits at most, so that a change of the highest bit changes
    many bits of a product.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view(_LANES.get(flat.element_size(), torch.int32))


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return a sum of all bits with weights by position, 0-dim int64 with overflow, where the tensor is."""
    lanes = _lanes_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    length = min(CHUNK, 1 << max(lanes.numel() - 1, 1).bit_length())
    weights = _weights(length, lanes.device)
    for chunk in torch.split(lanes, CHUNK):
        total = total * FACTOR + (chunk * weights[: chunk.numel()]).sum()
    return total


def fingerprint(inputs: Any, device: torch.device) -> Tensor:
    """Return a number of the bits, shapes and dtypes of tensors in ``inputs``: 0-dim int64 on a device."""
    tensors = list(tensors_in(inputs))
    shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
    total = torch.full((), zlib.crc32(repr(shapes).encode()), dtype=torch.int64, device=device)
    for tensor in tensors:
        found = _sum_bits(tensor)
        total = total * FACTOR + (found if found.device.type == device.type else to_device(found, device))
    return total


def sampled_fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number of some bits of each tensor: 0-dim int64 on a device. The bits of up to 1,024 lanes are
    read, wherever they are, so that no large tensor is copied.
    """
    lanes = [_sampled_lanes(tensor).long() for tensor in tensors]
    here = [each if each.device.type == device.type else to_device(each, device) for each in lanes]
    joined = torch.cat(here)
    return (joined * _weights(1 << (len(joined) - 1).bit_length(), device)[: len(joined)]).sum()


def _sampled_lanes(tensor: Tensor) -> Tensor:
    """Return lanes of a tensor from places that are spread over all of it, (n,)."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        lanes = _lanes_of(tensor)
        return torch.take(lanes, _places(lanes.numel(), lanes.device))
    return _lanes_of(torch.take(tensor.detach(), _places(tensor.numel(), tensor.device)))


@lru_cache(256)
def _places(length: int, device: torch.device) -> Tensor:
    """Return places in a flat tensor. They are no multiples of a number: those may all be in one column."""
    if length <= _SAMPLED:
        return torch.arange(length, device=device)
    # multiples of the golden ratio, modulo 1, are as evenly spread as can be (Weyl 1916)
    spread = torch.arange(1, _SAMPLED + 1, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1
    return to_device((spread * length).long(), device)
