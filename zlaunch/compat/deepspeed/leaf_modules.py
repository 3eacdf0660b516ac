"""DeepSpeed's functions for modules that stage 3 gathers as one; call them before ``initialize``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from zlaunch.runtime.engine import engine_of
from zlaunch.runtime.leaf_modules import Kind, mark_leaves
from zlaunch.runtime.log import warn
from zlaunch.runtime.zero.unit_policy import is_leaf

_Marked = tuple[list[nn.Module], list[str]]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind] | Kind, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return the modules of these classes, or names of classes. Raises ValueError if there are
    none.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind] | Kind, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark and return the modules of these classes. Raises ValueError if there are none."""
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Marked:
    """Mark modules by their names in the model; ``flag`` False unmarks them. Return them, and the names that
    no module has. Raises ValueError if there are such names.
    """
    return _all_found(mark_leaves(model, names=module_names, flag=flag), raise_if_not_found, "is named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> _Marked:
    """Mark modules by the ends of their names in the model; ``flag`` False unmarks them. Return them, and the
    ends that no name has. Raises ValueError if there are such ends.
    """
    marked = mark_leaves(model, suffixes=module_name_suffixes, flag=flag)
    return _all_found(marked, raise_if_not_found, "has a name that ends in")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    set_z3_leaf_modules_by_name(model, [""], flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether a module is marked."""
    return is_leaf(model)


def z3_leaf_parameter(model: Tensor) -> bool:
    """Tell whether a parameter belongs to a marked module of an engine's model at stage 3."""
    engine = engine_of(model)
    if engine is None or engine.zero_optimization_stage() < 3:
        return False
    return any(model is own for module in get_z3_leaf_modules(engine.module) for own in module.parameters())


def _of_classes(
    model: nn.Module, classes: Iterable[Kind] | Kind, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found, missing = mark_leaves(model, classes=classes, flag=flag)
    if not found and raise_if_not_found:
        raise ValueError(f"no module of the model is one of {missing}")
    _warn_if_late(found)
    marked, ordered = {id(module) for module in found}, []
    model.apply(lambda module: ordered.append(module) if id(module) in marked else None)
    return ordered


def _all_found(marked: _Marked, raise_if_not_found: bool, what: str) -> _Marked:
    found, missing = marked
    if missing and raise_if_not_found:
        raise ValueError(f"no module of the model {what} one of {missing}")
    _warn_if_late(found)
    return marked


def _warn_if_late(found: Iterable[nn.Module]) -> None:
    firsts = (next(module.parameters(), None) for module in found)
    if any(first is not None and engine_of(first) is not None for first in firsts):
        warn("leaf modules were marked after initialize: they count from the next initialize on")
