"""Marks leaf modules, which are gathered uncut: a mixture of experts as one, whichever are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from .config.zero import LeafModule
from .zero.unit_policy import LEAF_MARK

Kind = type[nn.Module] | str
"""Is a class, or its name, bare or with its module."""


def mark_leaves(
    model: nn.Module,
    *,
    classes: Iterable[Kind] | Kind = (),
    names: Iterable[str] = (),
    suffixes: Iterable[str] = (),
    flag: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules of the model as leaves, before its units are planned. Return them in the order of the
    entries, and the entries that match no module.

    ``names``: of modules in the model; ``suffixes``: how such names end. A single entry may stand without a
    list. ``flag`` False unmarks. Raises TypeError for a class that is none.
    """
    entries: list[tuple[Kind, Callable[[str, nn.Module, Kind], bool]]] = [
        *((kind, _is_a) for kind in _listed(classes)),
        *((wanted, lambda name, module, wanted: name == wanted) for wanted in _listed(names)),
        *((end, lambda name, module, end: name.endswith(str(end))) for end in _listed(suffixes)),
    ]
    found: dict[int, nn.Module] = {}
    missing: list[str] = []
    for entry, matches in entries:
        chosen = {id(each): each for name, each in model.named_modules() if matches(name, each, entry)}
        if not chosen:
            missing.append(entry if isinstance(entry, str) else entry.__name__)
        found |= chosen
    for module in found.values():
        setattr(module, LEAF_MARK, flag)
    return list(found.values()), missing


def mark_configured(model: nn.Module, section: LeafModule) -> list[str]:
    """Mark the leaves of a config's section; return the entries that match no module, without defaults."""
    _, missing = mark_leaves(
        model, classes=section.classes, names=section.names, suffixes=section.name_suffixes
    )
    defaults = LeafModule().classes
    return [entry for entry in missing if entry not in defaults]


def mark_lists_of_experts(model: nn.Module) -> list[str]:
    """Mark modules that have a list of several experts as leaves, and return their names: each rank may use
    others of them. The list's name has ``experts`` in it; one that was unmarked stays so.

    Not the model itself, which as a leaf would be gathered as a whole: only who marks it means that.
    """
    found = []
    for name, module in model.named_modules():
        lists = [
            child
            for key, child in module.named_children()
            if "experts" in key and isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len(child) > 1
        ]
        if lists and module is not model and not hasattr(module, LEAF_MARK):
            setattr(module, LEAF_MARK, True)
            found.append(name)
    return found


def _listed(given: Iterable[Kind] | Kind) -> list[Kind]:
    return [given] if isinstance(given, (str, type)) else list(given)


def _is_a(name: str, module: nn.Module, kind: Kind) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    if not isinstance(kind, str):
        raise TypeError(f"leaf modules must be classes or class names, not {type(kind).__name__}")
    own = type(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
