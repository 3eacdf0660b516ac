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
    """Build optimizer groups of ``parameters``: None, or an iterable of parameters, of (name, parameter)
    pairs, whose names are dropped, or of dicts with "params".

    Frozen parameters are among them: they are trained once they require a gradient. Raises ValueError if one
    is not a parameter of ``model`` or is listed twice, TypeError for entries of two kinds.
    """
    listed: list[Any] = list(model.parameters()) if parameters is None else list(parameters)
    for index, entry in enumerate(listed):
        if isinstance(entry, dict) is not isinstance(listed[0], dict):
            is_group = "is" if isinstance(entry, dict) else "is not"
            raise TypeError(
                f"model_parameters: entry {index} {is_group} a param group, unlike entry 0: pass only "
                "parameters, or only param groups"
            )
        if isinstance(entry, dict) and "params" not in entry:
            raise TypeError(
                f'model_parameters: entry {index} is a dict without "params": a param group is '
                '{"params": [...], "lr": ...}'
            )
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    known = {id(p) for p in model.parameters()}
    seen: set[int] = set()
    result = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in members]
        for parameter in members:
            if id(parameter) not in known:
                raise ValueError("model_parameters contains a tensor that is not a parameter of the model")
            if id(parameter) in seen:
                raise ValueError("model_parameters contains a parameter twice")
            seen.add(id(parameter))
        result.append({**group, "params": [p for p in members if is_shardable(p)]})
    return result
