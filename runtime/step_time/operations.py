"""Counts the operations of a module's step, and the samples or tokens that it takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ..memory.activations import fake_inputs, loss_of, on_fake_tensors, parse_shape
from ..memory.model_sizes import ModelSizes
from .simulate import Operations


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
