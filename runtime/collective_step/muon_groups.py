"""Decides which parameters of a model Muon steps: matrices of hidden layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..environment import read_environment
from ..log import say
from ..zero import placeholder

_OUTER_NAMES = ("embed", "lm_head")
"""Marks, in a parameter's name, what is at the model's ends; these are DeepSpeed's words."""


def split_for_muon(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, *, muon_lr: float, adam_lr: float
) -> list[dict[str, Any]]:
    """Split each group into the matrices that Muon steps and the rest, for AdamW, with ``use_muon`` and
    ``lr`` set; say what is left to AdamW. A group that has ``use_muon`` or ``lr`` keeps them.

    Left to AdamW are parameters of fewer than two dimensions, embeddings, output heads, what "embed" or
    "lm_head" in its name calls so, and parameters that carry ``use_muon = False``.
    """
    outer = {id(parameter) for parameter in _outer(model)}
    found: list[dict[str, Any]] = []
    for group in groups:
        chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            is_matrix = len(placeholder.shape_of(parameter)) >= 2 and id(parameter) not in outer
            own = bool(getattr(parameter, "use_muon", is_matrix))
            chosen[bool(group.get("use_muon", own))].append(parameter)
        rates = {True: muon_lr, False: adam_lr}
        for kind, members in chosen.items():
            if members:
                found.append({"lr": rates[kind], **group, "params": members, "use_muon": kind})
    if read_environment().rank == 0:
        say(_described(found, model))
    return found


def _described(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> str:
    """Say what Muon steps, and which matrices it leaves to AdamW."""
    members = {
        kind: [p for g in groups if g["use_muon"] is kind for p in g["params"]] for kind in (True, False)
    }
    left = {id(p) for p in members[False] if len(placeholder.shape_of(p)) >= 2}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in left]
    text = f"Muon steps {len(members[True])} matrices, AdamW the other {len(members[False])} parameters"
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = f"{text} (including the matrices {shown})" if names else text
    heads = _possible_heads(model, {id(p) for p in members[True]})
    if heads:
        text += (
            f"; one of {', '.join(heads)} may be the output head: if so, set use_muon = False on its weight"
        )
    return text


def _possible_heads(model: nn.Module, with_muon: set[int]) -> list[str]:
    """Name the linear layers that Muon steps and of which one may be an output head: several lead back from
    hidden states to as many numbers as an embedding has rows, and none of those that AdamW steps does.
    """
    rows = {(m.embedding_dim, m.num_embeddings) for m in model.modules() if isinstance(m, nn.Embedding)}
    fitting = {
        name: id(module.weight) in with_muon
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (module.in_features, module.out_features) in rows
    }
    return [name for name, muon in fitting.items() if muon] if all(fitting.values()) else []


def _outer(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters at the model's ends, in whatever modules they are shared."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from module.parameters()
            shape = module.embedding_dim, module.num_embeddings
            # one that leads back from hidden states to the embedding's rows; of several none is a head
            heads = [each for each in linear if (each.in_features, each.out_features) == shape]
            if len(heads) == 1:
                yield from heads[0].parameters()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield from head.parameters()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(word in name for word in _OUTER_NAMES):
            yield parameter
