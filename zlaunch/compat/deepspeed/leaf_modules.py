"""DeepSpeed's functions for modules that stage 3 gathers as one; call them before ``initialize``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zlaunch.runtime.leaf_modules import mark_leaves
from zlaunch.runtime.zero.unit_policy import is_leaf

_Classes = Iterable[type[nn.Module] | str]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: _Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or names of classes. Raises ValueError if there are none."""
    wanted = list(leaf_module_classes)
    return _checked(mark_leaves(model, classes=wanted), raise_if_not_found, wanted)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: _Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark the modules of these classes. Raises ValueError if there are none."""
    wanted = list(leaf_module_classes)
    return _checked(mark_leaves(model, classes=wanted, flag=False), raise_if_not_found, wanted)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their names in the model; ``flag`` False unmarks them."""
    wanted = sorted(set(module_names))
    return _checked(mark_leaves(model, names=wanted, flag=flag), raise_if_not_found, wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark modules by the ends of their names in the model; ``flag`` False unmarks them."""
    wanted = tuple(module_name_suffixes)
    return _checked(mark_leaves(model, suffixes=wanted, flag=flag), raise_if_not_found, wanted)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    mark_leaves(model, names=[""], flag=flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether a module is marked."""
    return is_leaf(model)


def _checked(found: list[nn.Module], must: bool, wanted: object) -> list[nn.Module]:
    if not found and must:
        raise ValueError(f"no module of the model is one of {wanted}")
    return found
