"""Places what is in no unit, and stays whole: buffers, and frozen parameters of other dtypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comm.collectives import Comm
from .errors import ParameterError
from .precision.buffers import BufferTypes
from .zero.unit_policy import is_shardable


def place_rest(model: nn.Module, comm: Comm, types: BufferTypes) -> None:
    """Move buffers and parameters of other dtypes to the device with rank 0's values, buffers in the dtypes
    that ``types`` chooses. One buffer of several modules stays one.
    """
    kept = types.kept_in_fp32(model)
    placed: dict[int, tuple[Tensor, Tensor]] = {}
    """Maps a buffer's id to the buffer, whose id nothing else may get, and to its place."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in placed:
                dtype = torch.float32 if id(buffer) in kept else types.of(module, name, buffer)
                placed[id(buffer)] = buffer, buffer.to(comm.device, dtype)
                _share(placed[id(buffer)][1], comm)
            module._buffers[name] = placed[id(buffer)][1]
    for parameter in model.parameters():
        if not is_shardable(parameter):
            parameter.data = parameter.data.to(comm.device)
            _share(parameter.data, comm)


def _share(tensor: Tensor, comm: Comm) -> None:
    """Copy rank 0's values of a tensor of any dtype to all ranks, byte for byte. Raises ParameterError for
    one that is not dense.
    """
    if tensor.layout is not torch.strided:
        raise ParameterError(f"unsupported layout {tensor.layout} of a buffer or parameter")
    flat = tensor.detach().contiguous().view(-1)
    comm.broadcast(flat.view(torch.uint8))
    tensor.detach().copy_(flat.view(tensor.shape))
