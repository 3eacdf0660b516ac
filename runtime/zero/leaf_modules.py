"""Leaf modules are not cut further: a mixture of experts is gathered as one, whichever are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

_LEAF = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes); to be called before ``initialize``. Returns
    them. Raises ValueError if there are none.
    """
    wanted = list(leaf_module_classes)
    found = [
        module
        for module in model.modules()
        if any(
            type(module).__name__ == kind or f"{type(module).__module__}.{type(module).__qualname__}" == kind
            if isinstance(kind, str)
            else isinstance(module, kind)
            for kind in wanted
        )
    ]
    return _mark(found, True, raise_if_not_found, wanted)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module]], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite."""
    wanted = list(leaf_module_classes)
    found = [module for module in model.modules() if any(isinstance(module, kind) for kind in wanted)]
    return _mark(found, False, raise_if_not_found, wanted)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The same by the modules' names in the model; ``flag`` False unmarks them."""
    wanted = set(module_names)
    found = [module for name, module in model.named_modules() if name in wanted]
    return _mark(found, flag, raise_if_not_found, sorted(wanted))


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """The same by the ends of those names."""
    wanted = tuple(module_name_suffixes)
    found = [module for name, module in model.named_modules() if name.endswith(wanted)]
    return _mark(found, flag, raise_if_not_found, wanted)


def mark_leaves(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]
) -> None:
    """What ``zero_optimization.leaf_module`` says; what the model does not have is passed over."""
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one."""
    setattr(model, _LEAF, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Those that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it is marked."""
    return bool(getattr(model, _LEAF, False))


def _mark(found: list[nn.Module], flag: bool, must: bool, wanted: object) -> list[nn.Module]:
    if not found and must:
        raise ValueError(f"no module of the model is one of {wanted}")
    for module in found:
        setattr(module, _LEAF, flag)
    return found
