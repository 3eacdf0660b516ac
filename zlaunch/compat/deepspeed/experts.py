"""Param groups by whether parameters are experts' of DeepSpeed's ``MoE`` layer: none are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import EXPERTS, NotInZlaunch


def is_moe_param(param: Tensor) -> bool:
    """Tell whether a parameter has ``allreduce = False``, as an expert's; ``initialize`` refuses it."""
    return not getattr(param, "allreduce", True)


def refuse_experts(parameters: Iterable[Any]) -> None:
    """Raise NotInZlaunch if a parameter is marked as an expert's: every rank would have its own."""
    if any(is_moe_param(parameter) for parameter in parameters):
        raise NotInZlaunch(
            "expert parallelism is not in zlaunch: a parameter has allreduce = False, but gradients are "
            f"averaged over all ranks: {EXPERTS}, and delete that attribute"
        )


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Tell whether there is such a layer, and its number of experts: a model with one cannot be made."""
    return False, 0


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return all the parameters, and none."""
    params = list(params)
    refuse_experts(params)
    return params, []


def split_params_grads_into_shared_and_expert_params(group: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the gradients that there are, in the parameters' dtype, and none."""
    group = list(group)
    refuse_experts(group)
    return [p.grad.to(p.dtype) for p in group if p.grad is not None], []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """Return the groups as they are, in a list. Raises ValueError for anything else than groups."""
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}, not a param group or a list of them"
        )
    for group in param_groups:
        group["params"] = list(group["params"])
        refuse_experts(group["params"])
    return list(param_groups)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Tell whether a group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Make param groups of these parameters, or return these groups. Raises TypeError for anything else."""
    if not isinstance(model_parameters, list) or not all(
        isinstance(entry, (Tensor, dict)) for entry in model_parameters
    ):
        raise TypeError("model_parameters has to be a list of parameters or of param groups")
    if model_parameters and isinstance(model_parameters[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": model_parameters, "name": "dense-params"}
    )
