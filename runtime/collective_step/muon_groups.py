"""Decides which parameters of a model Muon steps: matrices of hidden layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..zero import placeholder

_OUTER_NAMES = ("embed", "lm_head")
"""Marks, in a parameter's name, what is at the model's ends; these are DeepSpeed's words."""


def split_for_muon(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Split each group into the matrices that Muon steps and the rest, for AdamW, with ``use_muon`` set.

    Left to AdamW are parameters of fewer than two dimensions, embeddings, output heads, what "embed" or
    "lm_head" in its name calls so, and parameters that carry ``use_muon = False``. A group that has
    ``use_muon`` is taken as it is.
    """
    outer = {id(parameter) for parameter in _outer(model)}
    found: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            found.append(dict(group))
            continue
        chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            is_matrix = len(placeholder.shape_of(parameter)) >= 2 and id(parameter) not in outer
            chosen[bool(getattr(parameter, "use_muon", is_matrix))].append(parameter)
        found += [{**group, "params": each, "use_muon": kind} for kind, each in chosen.items() if each]
    return found


def _outer(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters at the model's ends, in whatever modules they are shared."""
    sizes = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            sizes.add(module.num_embeddings)
            yield from module.parameters()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features in sizes:
            yield from module.parameters()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield from head.parameters()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(word in name for word in _OUTER_NAMES):
            yield parameter
