"""Checks at each step that the model still is what the engine was made from."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from ..errors import ParameterError
from ..zero import placeholder
from ..zero.unit import Unit
from .accepted_parameters import untrainable

Table = dict[str, Any]


class Integrity:
    """Records each module's parameters and children, and each unit's parameters, and compares them later.

    Children without parameters and buffers (activation functions, dropout) may come and go. The comparisons
    are of identities and addresses, a fraction of a microsecond for each parameter.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._module, self._units = module, units
        self._frozen = [p for unit in units if not unit.trainable for p in unit.parameters]
        self._outside = [(n, p) for n, p in module.named_parameters() if placeholder.owner(p) is None]
        self._record()

    def _record(self) -> None:
        self._tables: list[tuple[nn.Module, Table, tuple[Any, ...]]] = []
        self._empty: list[Table] = []
        self._owners: list[nn.Module] = []
        """Holds the module of each table in ``_empty``."""
        for each in self._module.modules():
            for table in (each._parameters, each._modules):
                if table:
                    self._tables.append((each, table, tuple(table.values())))
                else:
                    self._empty.append(table)
                    self._owners.append(each)

    def unfrozen(self) -> list[nn.Parameter]:
        """Return parameters that were frozen and require a gradient now. Raises ParameterError for those that
        no engine can train.
        """
        for name, parameter in self._outside:
            if (reason := untrainable(parameter)) is not None:
                raise ParameterError(f"parameter {name} {reason}")
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def check(self) -> None:
        """Raise ParameterError, naming the parameter and the remedy, if anything has been replaced."""
        changed = [
            (module, table, expected)
            for module, table, expected in self._tables
            if len(table) != len(expected) or not all(map(is_, table.values(), expected))
        ]
        if any(map(len, self._empty)):
            changed += [(*pair, ()) for pair in zip(self._owners, self._empty, strict=True) if pair[1]]
        for module, table, expected in changed:
            kept, here = filter(_matters, expected), filter(_matters, table.values())
            if [id(each) for each in kept] != [id(each) for each in here]:
                raise ParameterError(self._explain(module, table, expected))
        if changed:
            self._record()
        with torch._C.DisableTorchFunctionSubclass():
            self._check_places()

    def _check_places(self) -> None:
        for unit in self._units:
            for index in range(len(unit.parameters)):
                if not unit.is_in_place(index):
                    raise ParameterError(
                        f"{unit.names[index]} is no longer in the engine's memory (its data was replaced or "
                        "swapped). Write in place: `with torch.no_grad(): parameter.copy_(values)`, at "
                        "stage 3 inside zlaunch.zero.GatheredParameters([parameter], modifier_rank=0)"
                    )

    def _explain(self, module: nn.Module, table: Table, expected: tuple[Any, ...]) -> str:
        prefix = next((name for name, each in self._module.named_modules() if each is module), "")
        known = {id(value) for value in expected}
        names = [name for name, value in table.items() if id(value) not in known and _matters(value)]
        what = f"{prefix}.{names[0]}" if prefix and names else (names[0] if names else prefix or "the model")
        done = "was replaced or added" if names else "lost parameters or modules"
        return (
            f"{what} {done} after zlaunch.initialize, so the engine does not train it: change the model "
            "before initialize, or call engine.destroy() and initialize again"
        )


def _matters(entry: Any) -> bool:
    """Tell whether the engine has to do with a parameter or child: not with a module that has neither
    parameters nor buffers, unless the runtime has replaced a forward in it.
    """
    if not isinstance(entry, nn.Module):
        return entry is not None
    has_tensors = next(entry.parameters(), None) is not None or next(entry.buffers(), None) is not None
    return has_tensors or any("forward" in vars(each) for each in entry.modules())


class GroupIntegrity:
    """Records the parameters in an optimizer's groups, and compares them later."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._expected = [tuple(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raise ParameterError if parameters were added or removed by hand."""
        groups = self._optimizer.param_groups
        for index, expected in enumerate(self._expected):
            here = groups[index]["params"] if index < len(groups) else ()
            if len(here) != len(expected) or not all(map(is_, here, expected)):
                raise ParameterError(
                    f"param group {index} of the optimizer does not have the parameters that the engine "
                    "trains: add parameters with optimizer.add_param_group, and freeze them with "
                    "parameter.requires_grad_(False)"
                )
        if len(groups) != len(self._expected):
            raise ParameterError(
                "the optimizer has new param groups: use optimizer.add_param_group to train them"
            )


def check_unfrozen(parameters: Sequence[nn.Parameter], groups: dict[int, int]) -> None:
    """Raise ParameterError for parameters that require a gradient, but that no optimizer group has."""
    for parameter in parameters:
        if id(parameter) not in groups:
            raise ParameterError(
                f"{placeholder.name_of(parameter)} was frozen at zlaunch.initialize and now requires "
                "a gradient, but the optimizer does not have it: call "
                "optimizer.add_param_group({'params': [...]})"
            )
