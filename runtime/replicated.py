"""Places what is in no unit, and stays whole: buffers, and frozen parameters of other dtypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comm.collectives import Comm
from .errors import ParameterError
from .zero.unit_policy import is_shardable


def place_rest(model: nn.Module, comm: Comm, dtype: torch.dtype | None) -> None:
    """Move buffers and parameters of other dtypes to the device with rank 0's values; cast floating-point
    buffers to the compute dtype, if there is one.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept = dtype if is_shardable(buffer) and dtype is not None else buffer.dtype
                module._buffers[name] = buffer.to(comm.device, kept)
                _share(module._buffers[name], comm)  # type: ignore[arg-type]
    for parameter in model.parameters():
        if not is_shardable(parameter):
            parameter.data = parameter.data.to(comm.device)
            _share(parameter.data, comm)


def _share(tensor: Tensor, comm: Comm) -> None:
    """Copy rank 0's values of a tensor of any dtype to all ranks, byte for byte. Raises ParameterError for
    one that is not dense.
    """
    if tensor.layout is not torch.strided:
        raise ParameterError(f"a buffer or parameter has the layout {tensor.layout}, which is not supported")
    flat = tensor.detach().contiguous().view(-1)
    comm.broadcast(flat.view(torch.uint8))
    tensor.detach().copy_(flat.view(tensor.shape))
