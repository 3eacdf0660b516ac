"""Finds the layers that a model calls one after the other, and divides them into the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from ..errors import ParameterError

NOTE = "zlaunch_line"
"""Names the attribute of a model that says what its layers are: the name of the module whose children they
are, or a list of modules."""
USES, WEIGHTS = "zlaunch_uses", "zlaunch_weights"
"""Name the attribute of a layer that lists modules which it computes with but which are registered elsewhere,
and that of a model that has the layers' weights by which they are divided."""


ROUTERS = (
    "pipeline parallelism: the router loss (output_router_logits) needs all layers, but a stage has only "
    "some: set it to false"
)


@dataclass
class Line:
    """Holds a model's layers in their order, and which part of the pipeline has which."""

    model: nn.Module
    name: str
    layers: list[nn.Module]
    stages: int
    """Ranks of a pipeline; part p is on stage p % stages."""
    bounds: list[int] = field(default_factory=list)
    """The first layer of each part, and the number of layers."""
    loss_fn: Callable[..., Any] | None = None

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(self.bounds) - 1

    def part_of(self, index: int) -> int:
        """Return the part that has a layer."""
        return next(part for part in range(self.parts) if index < self.bounds[part + 1])


def find_line(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the members of the list of layers of a model: that of the most parameters.

    Raises ParameterError for a model without one.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ParameterError(ROUTERS)
    noted = getattr(model, NOTE, None)
    if isinstance(noted, str):
        return noted, list(model.get_submodule(noted).children())
    if noted is not None:
        return "", list(noted)
    found = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(each) for each in module}) == 1
    ]
    if not found:
        raise ParameterError(
            f"pipeline parallelism: {type(model).__name__} has no nn.ModuleList of layers of one class to "
            "split; for a list of any layers, use deepspeed.pipe.PipelineModule"
        )
    _, name, module = max(found, key=lambda each: each[0])
    if len({id(each) for each in module}) < len(module):
        raise ParameterError(
            f"pipeline parallelism: {name} uses one module as several layers, which is not supported: use "
            "deepspeed.pipe.PipelineModule"
        )
    return name, list(module)


def modules_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules that a layer computes with."""
    return [each for own in (layer, *getattr(layer, USES, ())) for each in own.modules()]


def weights_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return the weights of the layers: those that the model has noted, or their numbers of elements."""
    noted: Sequence[int] | None = getattr(model, WEIGHTS, None)
    if noted is not None:
        return list(noted)
    owned = [{p for own in (layer, *getattr(layer, USES, ())) for p in own.parameters()} for layer in layers]
    return [sum(parameter.numel() for parameter in each) for each in owned]


def divide(weights: Sequence[int], parts: int, how: str | Sequence[int]) -> list[int]:
    """Return the first layer of each part, and the number of layers.

    ``weights`` are those of the layers; ``how`` is "uniform", "parameters" or "best" (the heaviest part is as
    light as can be), or a list of first layers. Raises ParameterError for fewer layers than parts, and a list
    that does not fit.
    """
    count = len(weights)
    if count < parts:
        raise ParameterError(f"pipeline parallelism: cannot split {count} layers into {parts} parts")
    if not isinstance(how, str):
        bounds = [0, *how, count]
        if len(bounds) != parts + 1 or any(a >= b for a, b in pairwise(bounds)):
            raise ParameterError(
                f"pipeline.partition: {list(how)} does not split {count} layers into {parts} parts: list "
                f"the first layer of parts 2 to {parts}, in ascending order"
            )
        return bounds
    if how == "uniform":
        return [part * count // parts for part in range(parts + 1)]
    return _balanced([max(1, weight) for weight in weights], parts)


def _balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Divide so that the heaviest part is as light as can be (the linear partition problem, by bisection)."""
    low, high = max(weights), sum(weights)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(weights, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    starts = _filled(weights, low)
    while len(starts) < parts:  # fewer parts would do: cut the longest
        bounds = [*starts, len(weights)]
        sizes = [b - a for a, b in pairwise(bounds)]
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        starts.insert(longest + 1, starts[longest] + sizes[longest] // 2)
    return [*starts, len(weights)]


def _filled(weights: Sequence[int], limit: int) -> list[int]:
    """Return where parts begin that are filled up to a limit, one after the other."""
    starts, total = [0], 0
    for index, weight in enumerate(weights):
        if total + weight > limit:
            starts.append(index)
            total = 0
        total += weight
    return starts
