"""Param groups by whether parameters are experts' of DeepSpeed's ``MoE`` layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import EXPERTS, NotInZlaunch
from zlaunch.compat.deepspeed.moe import MoE

_LARGEST_GROUP = 178956971


def is_moe_param(param: Tensor) -> bool:
    """Tell whether a parameter has ``allreduce = False``, as an expert's."""
    return not getattr(param, "allreduce", True)


def refuse_foreign_experts(model: nn.Module) -> None:
    """Raise NotInZlaunch if a parameter outside of the ``MoE`` layers is marked as an expert's: every rank
    would have its own.
    """
    own = {id(p) for m in model.modules() if isinstance(m, MoE) for p in m.deepspeed_moe.experts.parameters()}
    _refuse(parameter for parameter in model.parameters() if id(parameter) not in own)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Tell whether there is such a layer, and the number of experts of the first."""
    found = [module for module in m.modules() if isinstance(module, MoE)]
    return bool(found), found[0].num_experts if found else 0


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters that are not experts', and those that are."""
    params = list(params)
    _refuse(params, "group_name")
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the gradients that there are, in the parameters' dtype: those of no expert, and experts'."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    grads = [[p.grad.to(p.dtype) for p in part if p.grad is not None] for part in (shared, experts)]
    return grads[0], grads[1]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = _LARGEST_GROUP,
) -> list[dict[str, Any]]:
    """Return the groups without the experts' parameters, and after them groups of those, with the same
    options, ``moe`` True and ``name`` the experts' group; each has at most ``max_group_size`` elements, or
    one parameter. Raises ValueError for anything else than groups.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}, not a param group or a list of them"
        )
    found: list[dict[str, Any]] = []
    for group in param_groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        for name in dict.fromkeys(p.group_name for p in experts):
            own = [p for p in experts if p.group_name == name]
            for part in _parts(own, max_group_size):
                found.append({**group, "name": name, "moe": True, "params": part})
    return [*param_groups, *found]


def _parts(parameters: list[Any], largest: float | None) -> list[list[Any]]:
    """Divide parameters, in their order, into lists of so many elements."""
    found: list[list[Any]] = [[]]
    numel = 0
    for parameter in parameters:
        if largest is not None and found[-1] and numel + parameter.numel() > largest:
            found.append([])
            numel = 0
        found[-1].append(parameter)
        numel += parameter.numel()
    return found


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Tell whether a group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Make param groups of these parameters, or return these groups. Raises TypeError for anything else."""
    if not isinstance(model_parameters, list) or not all(
        isinstance(entry, (Tensor, dict)) for entry in model_parameters
    ):
        raise TypeError("model_parameters: expected a list of parameters or of param groups")
    if model_parameters and isinstance(model_parameters[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": model_parameters, "name": "dense-params"}
    )


def _refuse(parameters: Iterable[Any], mark: str | None = None) -> None:
    """Raise NotInZlaunch if a parameter is marked as an expert's, without another mark."""
    if any(is_moe_param(each) and (mark is None or not hasattr(each, mark)) for each in parameters):
        raise NotInZlaunch(
            "experts of another library are not supported: a parameter outside MoE layers has "
            "allreduce = False, but zlaunch averages its gradients over all ranks: "
            f"{EXPERTS}, and delete that attribute"
        )
