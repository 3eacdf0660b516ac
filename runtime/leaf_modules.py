"""Marks leaf modules, which are gathered uncut: a mixture of experts as one, whichever are used."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .zero.unit_policy import LEAF_MARK


def mark_leaves(
    model: nn.Module,
    *,
    classes: Iterable[type[nn.Module] | str] = (),
    names: Iterable[str] = (),
    suffixes: Iterable[str] = (),
    flag: bool = True,
) -> list[nn.Module]:
    """Mark modules of the model as leaves, before its units are planned, and return them.

    ``classes``: classes, or their names, bare or with their module. ``names``: of modules in the model;
    ``suffixes``: how such names end. Entries that match nothing are ignored. ``flag`` False unmarks.
    """
    kinds, wanted, ends = list(classes), set(names), tuple(suffixes)
    found = [
        module
        for name, module in model.named_modules()
        if name in wanted or name.endswith(ends) or any(_is_a(module, kind) for kind in kinds)
    ]
    for module in found:
        setattr(module, LEAF_MARK, flag)
    return found


def mark_lists_of_experts(model: nn.Module) -> list[str]:
    """Mark modules that have a list of several experts as leaves, and return their names: each rank may use
    others of them. The list's name has ``experts`` in it; one that was unmarked stays so.
    """
    found = []
    for name, module in model.named_modules():
        lists = [
            child
            for key, child in module.named_children()
            if "experts" in key and isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len(child) > 1
        ]
        if lists and not hasattr(module, LEAF_MARK):
            setattr(module, LEAF_MARK, True)
            found.append(name)
    return found


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if not isinstance(kind, str):
        return isinstance(module, kind)
    own = type(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
