"""Checks at the start that all ranks train equal models with equal configs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from ..comm.collectives import Comm
from ..errors import RankMismatchError
from ..zero import placeholder

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
