"""Looks at the operations of a pass: notices those that compute with this rank's part of a parameter or
activation as if it were whole, and whole parameters that meet parts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import ParameterError
from ..zero import external_writes, placeholder
from .forwards import SharedForward
from .part_uses import PartUses
from .whole_uses import WholeUses

_VALUES = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__")
"""Names what makes something other than a tensor of values."""
_HARMLESS = ("grad", "_grad", "_base", "grad_fn")
"""Names attributes that give another tensor, or none, which has no value of this one."""
_OF_PARAMETERS = (placeholder.__name__, external_writes.__name__)
"""Names the modules with attributes that parameters of the runtime have for whoever asks."""


class LoneUses(TorchFunctionMode):
    """Raises ParameterError where an operation uses a cut parameter outside of the modules that know it, or
    computes along a dimension of which each rank has a part. ``wholes`` follows the other parameters.
    """

    def __init__(
        self, model: nn.Module, cut: Mapping[int, str], forwards: Mapping[str, Any], wholes: WholeUses
    ) -> None:
        """``cut`` names parameters by their ids; those whose modules, or modules around them, have
        ``forwards`` of their own are watched.
        """
        super().__init__()
        self.parts, self.wholes = PartUses(), wholes
        self._names: dict[int, str] = {}
        self._modules: dict[int, list[nn.Module]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            around = [own for own in forwards if name == own or name.startswith(f"{own}.")]
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in cut and around:
                    self._names[id(parameter)] = cut[id(parameter)]
                    found = self._modules.setdefault(id(parameter), [])
                    found += [model.get_submodule(own) for own in around]

    def __deepcopy__(self, memo: Any) -> LoneUses:
        return self  # a copy of a model is looked at in the same way

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. Raises ParameterError for a use that the rest of a parameter would be missed in."""
        name = _name_of(func)
        part = self.parts.before(name, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs or {})):
            if id(each) in self._names and _reads(func, found, each) and not self._knows(id(each)):
                raise ParameterError(
                    f"tensor parallelism: {name} uses {self._names[id(each)]}, which is sharded, outside "
                    "its own module: remove the module from tensor_parallel.plan"
                )
        if part is not None:
            self.parts.after(name, part, found)
        if name not in _HARMLESS:
            self.wholes.after(name, args, kwargs or {}, found, looks=not _is_of_runtime())
        return found

    def _knows(self, identity: int) -> bool:
        """Tell whether the present call is the runtime's, or inside of a module that computes with parts."""
        frame, is_first = sys._getframe(2), True
        while frame is not None:
            place = frame.f_globals.get("__name__", "")
            if is_first and not place.startswith("torch") and place not in _OF_PARAMETERS:
                if place.startswith("zlaunch."):
                    return True
                is_first = False
            own = frame.f_locals.get("self")
            if isinstance(own, SharedForward) and any(own.module is m for m in self._modules[identity]):
                return True
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return False


def _is_of_runtime() -> bool:
    """Tell whether the runtime itself calls the operation that is looked at: it knows what it sums."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("zlaunch.")


def _reads(func: Any, found: Any, parameter: Tensor) -> bool:
    name = _name_of(func)
    if name in _HARMLESS:
        return False
    return name in _VALUES or any(isinstance(t, Tensor) and t is not parameter for t in tree_leaves(found))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name
