"""Builds the groups of parameters that an optimizer is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..zero.unit_policy import is_shardable


def groups_by_parameter(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Map the id of each parameter to its group's index."""
    return {id(p): index for index, group in enumerate(groups) for p in group["params"]}


def parameter_groups(parameters: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Build optimizer groups of ``parameters``: None, or an iterable of parameters or dicts with "params".

    Frozen parameters are among them: they are trained once they require a gradient. Raises ValueError if one
    is not a parameter of ``model`` or is listed twice.
    """
    listed: list[Any] = list(model.parameters()) if parameters is None else list(parameters)
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    known = {id(p) for p in model.parameters()}
    seen: set[int] = set()
    result = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        for parameter in members:
            if id(parameter) not in known:
                raise ValueError("model_parameters holds a tensor that is not a parameter of the model")
            if id(parameter) in seen:
                raise ValueError("model_parameters holds a parameter twice")
            seen.add(id(parameter))
        result.append({**group, "params": [p for p in members if is_shardable(p)]})
    return result
