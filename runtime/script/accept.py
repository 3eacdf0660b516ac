"""Decides which parameters an engine can take, refuses others by name, and compares those of all ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm.collectives import Comm
from ..errors import RankMismatchError
from ..zero import placeholder
from ..zero.policy import is_shardable

# -- accepted parameters ----------------------------------------------------------------------------


def find_refused(model: nn.Module) -> str | None:
    """Describe in words what the model has that no engine can train; None if there is nothing."""
    for name, parameter in model.named_parameters():
        reason = _refusal(parameter)
        if reason is not None:
            return f"parameter {name} {reason}"
    return _overlap(model.named_parameters())


def _refusal(parameter: nn.Parameter) -> str | None:
    if nn.parameter.is_lazy(parameter):
        return "is lazy and has no shape yet: run one batch through the model before zlaunch.initialize"
    if placeholder.owner(parameter) is not None:
        return None
    if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
        return (
            "is a DTensor, already distributed: pass a plain model to initialize (parameter.full_tensor() or "
            "from_pretrained without tp_plan), and set tensor_parallel and zero_optimization in the config"
        )
    if parameter.is_meta:
        return (
            "is on the meta device and has no values: build the model on the CPU, or inside "
            "zlaunch.zero.Init(), or call model.to_empty(device=...) and initialize it"
        )
    if is_traceable_wrapper_subclass(parameter):
        return f"is a {type(parameter).__name__}, a tensor subclass, which is not supported"
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return f"has the layout {parameter.layout}, which is not supported: use a dense tensor"
    if (reason := untrainable(parameter)) is not None:
        return reason
    kind = type(parameter)
    try:
        kinds = placeholder.kinds_for(kind)
        parameter.__class__ = kinds.managed
        parameter.__class__ = kind
    except TypeError:
        return f"is a {kind.__name__}, which is not supported: use torch.nn.Parameter"
    return None


def untrainable(parameter: nn.Parameter) -> str | None:
    """Describe in words why a parameter that requires grad cannot be trained; None if it can."""
    if parameter.requires_grad and not is_shardable(parameter):
        return (
            f"is {str(parameter.dtype).removeprefix('torch.')} and requires grad, which is not supported: "
            "use float32, float64, bfloat16 or float16 (torch.view_as_real for complex)"
        )
    return None


def _overlap(parameters: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """Describe two parameters on shared memory: each would get a separate copy."""
    spans = []
    for name, parameter in parameters:
        if placeholder.owner(parameter) is None and parameter.numel() and is_shardable(parameter):
            first = parameter.data_ptr()
            extent = sum(
                (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            spans.append((parameter.device, first, first + (extent + 1) * parameter.element_size(), name))
    spans.sort(key=lambda span: (str(span[0]), span[1]))
    for (device, _, stop, name), (device2, start, _, name2) in itertools.pairwise(spans):
        if device == device2 and start < stop:
            return (
                f"parameters {name} and {name2} share memory, but are two parameters: share one "
                "nn.Parameter object, or clone one of them"
            )
    return None


# -- consistency ------------------------------------------------------------------------------------
#
# Checks at the start that all ranks train equal models with equal configs.


Signature = tuple[str, tuple[int, ...], str, bool]


def check_consistency(model: nn.Module, config_digest: str, comm: Comm) -> None:
    """Raise RankMismatchError on every rank, naming the first rank and parameter that differ from rank 0."""
    mine = [
        (n, tuple(placeholder.shape_of(p)), str(p.dtype), p.requires_grad)
        for n, p in model.named_parameters()
    ]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    summaries = comm.exchange((digest, config_digest))
    if all(summary == summaries[0] for summary in summaries):
        return
    everyone = comm.exchange((mine, config_digest))
    reference, reference_config = everyone[0]
    for rank, (other, config) in enumerate(everyone):
        if config != reference_config:
            raise RankMismatchError(
                f"rank {rank} has a different config from rank 0: give every rank the same file"
            )
        difference = first_difference(reference, other)
        if difference:
            raise RankMismatchError(f"rank {rank} has a different model from rank 0: {difference}")


def first_difference(reference: Sequence[Signature], other: Sequence[Signature]) -> str | None:
    """Describe in words the first difference between two lists of parameters; None if they are equal."""
    for (name, shape, dtype, grad), (name2, shape2, dtype2, grad2) in zip(reference, other, strict=False):
        if name != name2:
            return f"it has parameter {name2}, rank 0 has {name}"
        if shape != shape2:
            return f"parameter {name} has shape {list(shape2)}, but {list(shape)} on rank 0"
        if dtype != dtype2:
            return f"parameter {name} is {dtype2}, but {dtype} on rank 0"
        if grad != grad2:
            return f"parameter {name} is {'trainable' if grad2 else 'frozen'}, but not on rank 0"
    if len(reference) != len(other):
        longer, who = (other, "only it") if len(other) > len(reference) else (reference, "only rank 0")
        return f"{who} has parameter {longer[min(len(reference), len(other))][0]}"
    return None
