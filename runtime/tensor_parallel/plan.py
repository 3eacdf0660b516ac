"""Finds which style each module and parameter of a model has, from its own plan or the config's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..errors import ParameterError
from ..model_plans import matching, own_plan, suggestion

STYLES = frozenset(
    (
        *("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"),
        *("packed_colwise", "packed_rowwise", "embedding_rowwise", "embedding_colwise"),
        *("replicated_with_grad_allreduce", "moe_tp_experts", "all_reduce", "replicate", "local_params"),
        "mla_kv_a_proj",
    )
)
"""Names the styles that are supported, as Hugging Face's plans have them."""
_OLD_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}


_NOTE = "zlaunch_tp_plan"


def tensor_parallel(module: nn.Module, plan: Mapping[str, str]) -> nn.Module:
    """Attach a tensor-parallel plan to ``module``, and return the module.

    The config's ``parallel.tensor`` sets the number of ranks, and its ``tensor_parallel.plan`` overrides
    this plan.

    Args:
        module: The module.
        plan: Style of each submodule and parameter, by its name in ``module``; "*" matches any number.

    Raises:
        ParameterError: A style does not exist, or a name matches nothing in the module.
    """
    _matches(module, plan, "tensor_parallel")
    setattr(module, _NOTE, dict(plan))
    return module


def find_plan(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the style of each module and parameter by its name.

    Raises ParameterError for a model without a plan, a style that does not exist, and a name in a given plan
    that the model does not have.
    """
    if given is not None:
        found = _matches(model, given, "tensor_parallel.plan")
    else:
        found = _matches(model, own_plan(model, "tp"), None)
        for prefix, module in model.named_modules():
            noted = _matches(module, getattr(module, _NOTE, {}), "tensor_parallel")
            found |= {".".join(filter(None, (prefix, name))): style for name, style in noted.items()}
    cuts_nothing = {"replicate"} if given is not None else {"replicate", "colwise_gather_output"}
    if cuts_nothing.issuperset(found.values()):
        raise ParameterError(
            f"{type(model).__name__} has no plan for tensor parallelism: set tensor_parallel.plan "
            '{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise", ...}, or '
            "zlaunch.tensor_parallel(module, plan) where the model is built, or set its size to 1"
        )
    return found


def _matches(module: nn.Module, patterns: Mapping[str, str], asked_by: str | None) -> dict[str, str]:
    """Return the style of each module and parameter that patterns name; what somebody asks for must exist."""
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        style = _OLD_NAMES.get(style, style)
        if style not in STYLES:
            raise ParameterError(
                f"{asked_by or 'tensor parallelism'}: {pattern}: the style {style!r} is not supported; use "
                f"one of {', '.join(sorted(STYLES))}"
            )
        names = matching(module, pattern)
        if asked_by is not None and not names:
            known = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
            raise ParameterError(
                f"{asked_by}: no module or parameter matches {pattern}{suggestion(known, pattern)}"
            )
        found.update(dict.fromkeys(names, style))
    return found
