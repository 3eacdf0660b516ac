"""Finds a model's modules of experts, and how their parameters are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..cut import Box, whole_box
from ..errors import ParameterError
from ..model_plans import matching, own_plan, suggestion
from ..zero import placeholder
from .axis import ExpertAxis
from .experts import Experts
from .forward import DispatchForward

_STYLE = "ep_dispatch_experts"
"""Names the style of such modules in Hugging Face's plans."""


@dataclass(slots=True)
class ExpertPlan:
    """Holds what is decided about the modules of experts of a model."""

    axis: ExpertAxis
    boxes: dict[int, tuple[Box, ...]] = field(default_factory=dict)
    """The parts of each parameter of experts, by its id."""
    modules: dict[str, int] = field(default_factory=dict)
    """The number of experts of each module, by its name."""
    settings: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Attributes of modules that get other values."""

    def decide(
        self,
        model: nn.Module,
        given: Sequence[str] | None,
        cut: dict[int, tuple[Box, ...]],
        forwards: dict[str, Any],
    ) -> None:
        """Decide about all modules of experts. ``cut`` and ``forwards`` are what tensor parallelism has
        decided: its parts of experts' parameters are cut further, and its forwards serve this rank's experts.

        Raises ParameterError for a model without such modules, and for parameters that cannot be cut.
        """
        for name, module in _find(model, given).items():
            total = self._count(name, module)
            self.modules[name] = total
            for key, parameter in module.named_parameters():
                parts = (
                    cut.pop(id(parameter), None) or (whole_box(_shape(parameter)),) * self.axis.mesh.tensor
                )
                self.boxes[id(parameter)] = self._cut_further(f"{name}.{key}", parts, total)
            forwards[name] = DispatchForward(module, name, self.axis, total, forwards.get(name))
            self.settings += [
                (module, key, total // self.axis.size)
                for key, value in vars(module).items()
                if "experts" in key and type(value) is int and value == total
            ]
        self._refuse_shared(model)

    def _count(self, name: str, module: nn.Module) -> int:
        """Return the number of experts of a module."""
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ParameterError(
                f"expert parallelism: {name} is a {type(module).__name__} of separate modules: wrap them in "
                "zlaunch.Experts([...]) and call it with (tokens, index, weights)"
            )
        lengths = {(_shape(p) or (0,))[0] for p in module.parameters()}
        if len(lengths) != 1:
            shapes = ", ".join(f"{key} {list(_shape(p))}" for key, p in module.named_parameters())
            raise ParameterError(
                f"expert parallelism: the first dimension of every parameter of {name} must be the experts, "
                f"got {shapes or 'no parameters'}"
            )
        total, size = lengths.pop(), self.axis.size
        if total % size:
            fitting = [str(n) for n in range(1, total + 1) if total % n == 0]
            raise ParameterError(
                f"expert parallelism: the {total} experts of {name} cannot be divided by {size} ranks; "
                f"possible sizes: {', '.join(fitting)}"
            )
        return total

    def _cut_further(self, name: str, parts: tuple[Box, ...], total: int) -> tuple[Box, ...]:
        step = total // self.axis.size
        if any(part[0] != ((0, total),) for part in parts):
            raise ParameterError(f"expert parallelism: tensor parallelism already shards {name} by experts")
        return tuple(
            (((place * step, (place + 1) * step),), *part[1:])
            for place in range(self.axis.size)
            for part in parts
        )

    def _refuse_shared(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            inside = any(name == own or name.startswith(f"{own}.") for own in self.modules)
            for key, parameter in module._parameters.items():
                if not inside and parameter is not None and id(parameter) in self.boxes:
                    raise ParameterError(
                        f"expert parallelism: {name}.{key} shares a parameter with experts, which is not "
                        "supported"
                    )


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(placeholder.shape_of(parameter))


def _find(model: nn.Module, given: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules of experts by name: all Experts, and those of a config's patterns or the model's own
    plan.
    """
    patterns = given
    if patterns is None:
        patterns = [name for name, style in own_plan(model, "ep").items() if style == _STYLE]
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {n: each for n, each in modules.items() if isinstance(each, Experts)}
    for pattern in patterns:
        names = [name for name in matching(model, pattern) if name in modules]
        if given is not None and not names:
            raise ParameterError(
                f"expert_parallel.experts: no module matches {pattern}{suggestion(modules, pattern)}"
            )
        found |= {name: modules[name] for name in names}
    if not found:
        listed = [n for n, each in modules.items() if isinstance(each, nn.ModuleList) and "experts" in n]
        if listed:
            raise ParameterError(
                f"{type(model).__name__} has no plan for expert parallelism: wrap the modules of "
                f"{listed[0]} in zlaunch.Experts([...]), called with (tokens, index, weights); or name "
                'modules with stacked parameters, expert_parallel.experts ["layers.*.experts"]; or set '
                "the size to 1"
            )
        raise ParameterError(
            f"{type(model).__name__} has no plan for expert parallelism: name the expert modules, "
            'expert_parallel.experts ["layers.*.experts"], use zlaunch.Experts, or set the size to 1'
        )
    return found
