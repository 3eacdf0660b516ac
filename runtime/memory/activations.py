"""Estimates the memory of activations: of a module by fake tensors, of numbers by a formula."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from ..activation.checkpointing import checkpoint_blocks
from ..errors import MemoryPlanError
from ..zero.output_tensors import tensors_in
from .model_sizes import ModelSizes, described

_LAYER_BYTES = 34
"""Counts the bytes that a transformer layer keeps for each element of its input in 16 bits, with an attention
that keeps no matrix of scores (Korthikanti et al., 2022, equation 1 without its second term).
"""
_DTYPES = {
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Activations:
    """Holds the bytes that a rank's activations take at most, in a step with one micro-batch."""

    plain: int
    checkpointed: int | None
    """With every block checkpointed; None where there are no blocks."""
    source: str


def of_numbers(model: ModelSizes, sequence: int, micro_batch: int, dtype_bytes: int) -> Activations | None:
    """Estimate a transformer's activations from its width, depth and vocabulary; None if one is not known.

    Source: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models". The
    output layer has logits in the compute dtype and in fp32, and a gradient of each.
    """
    if model.hidden is None or model.layers is None or model.vocab is None:
        return None
    tokens = sequence * micro_batch
    layer = _LAYER_BYTES * tokens * model.hidden * dtype_bytes // 2
    head = tokens * model.vocab * 2 * (dtype_bytes + 4)
    inputs = tokens * model.hidden * dtype_bytes * model.layers
    source = "the formula of Korthikanti et al., 2022"
    return Activations(layer * model.layers + head, inputs + max(layer, head), source)


def of_module(
    model: ModelSizes, sequence: int, micro_batch: int, dtype: torch.dtype, shape: str | None = None
) -> Activations | None:
    """Measure a module's activations by running it on fake tensors; None where its inputs are not known.

    A language model gets ``input_ids`` and ``labels`` of ``micro_batch`` x ``sequence``. ``shape`` describes
    the input of any other, such as ``8,3,224,224`` or ``8,128:int64``. Raises MemoryPlanError if it cannot be
    run so.
    """
    if model.build is None or not (model.is_language_model or shape):
        return None
    inputs = None if shape is None else parse_shape(shape)
    plain = _peak(model, sequence, micro_batch, dtype, inputs, checkpointed=False)
    assert plain is not None
    less = _peak(model, sequence, micro_batch, dtype, inputs, checkpointed=True)
    return Activations(plain, less, "a pass on fake tensors")


def parse_shape(text: str) -> tuple[Sequence[int], torch.dtype | None]:
    """Read ``2,128:int64``; no dtype means the compute dtype. Raises MemoryPlanError."""
    sizes, _, name = text.partition(":")
    if not re.fullmatch(r"\d+(,\d+)*", sizes) or (name and name not in _DTYPES):
        raise MemoryPlanError(
            f"--input {text}: expected sizes, such as 8,3,224,224, and for other numbers than the model's a "
            f"dtype ({', '.join(_DTYPES)}), such as 8,128:int64"
        )
    return [int(size) for size in sizes.split(",")], _DTYPES.get(name)


def _peak(
    model: ModelSizes,
    sequence: int,
    micro_batch: int,
    dtype: torch.dtype,
    inputs: tuple[Sequence[int], torch.dtype | None] | None,
    *,
    checkpointed: bool,
) -> int | None:
    """Return the largest sum of everything but parameters and buffers in a forward and backward pass."""
    assert model.build is not None
    before, log = torch.get_default_dtype(), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    torch.set_default_dtype(dtype)
    log.setLevel(logging.CRITICAL)  # it writes a traceback of what is raised here
    try:
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("ignore")
            module = model.build().train()
            if checkpointed:
                try:
                    checkpoint_blocks(module)
                except ValueError:
                    return None
            for parameter in module.parameters():
                if parameter.requires_grad:  # the runtime takes each gradient when it arrives
                    parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
            given = _fake_inputs(model, sequence, micro_batch, dtype, inputs)
            tracker: Any = MemTracker()
            tracker.track_external(module)
            with tracker:
                _run(module, given).backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
            found = tracker.get_tracker_snapshot("peak")
    except MemoryPlanError:
        raise
    except Exception as error:
        raise MemoryPlanError(
            f"{model.name} cannot be run on fake tensors{_shown(inputs, dtype)}: {described(error)}"
        ) from error
    finally:
        torch.set_default_dtype(before)
        log.setLevel(level)
    return sum(
        int(nbytes)
        for of_device in found.values()
        for kind, nbytes in of_device.items()
        if str(kind).rpartition(".")[2] not in ("PARAM", "BUFFER", "Total")
    )


def _shown(inputs: tuple[Sequence[int], torch.dtype | None] | None, dtype: torch.dtype) -> str:
    if inputs is None:
        return ""
    sizes, kind = inputs
    name = str(kind or dtype).removeprefix("torch.")
    hint = "" if kind else "; of token ids: add :int64 to --input"
    return f", with an input of {','.join(map(str, sizes))} in {name}{hint}"


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _fake_inputs(
    model: ModelSizes,
    sequence: int,
    micro_batch: int,
    dtype: torch.dtype,
    inputs: tuple[Sequence[int], torch.dtype | None] | None,
) -> Any:
    if inputs is not None:
        sizes, kind = inputs
        return torch.empty(list(sizes), dtype=kind or dtype)
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _run(module: nn.Module, given: Any) -> Tensor:
    output = module(**given) if isinstance(given, dict) else module(given)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise MemoryPlanError("the model's output has no tensor with a gradient")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
