"""Finds which style each module and parameter of a model has, from its own plan or the config's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm.shard_spec import ShardSpec, spec_of
from ..config.partition_config import PartitionConfig, read_partition_config
from ..errors import ParameterError
from ..models import matching, own_plan, suggestion

# -- plan -------------------------------------------------------------------------------------------


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


def find_plan(
    model: nn.Module, given: Mapping[str, str] | None, partition: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the style of each module and parameter by its name. ``partition`` is DeepSpeed's
    partition_config.

    Raises ParameterError for a model without a plan, a style that does not exist, and a name in a given plan
    that the model does not have.
    """
    if partition is not None:
        return _of_partition(model, read_partition_config(partition))
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


def _of_partition(model: nn.Module, partition: PartitionConfig) -> dict[str, str]:
    """Return the plan that DeepSpeed's specs make: styles of linear layers, by names of their weights, and
    of parameters whose gradients are summed.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    summed = "replicated_with_grad_allreduce"
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        for key, _ in module.named_parameters(recurse=False):
            parameter = f"{name}.{key}" if name else key
            style = partition.style_of(parameter, model_type)
            if style == summed:
                found[parameter] = style
            elif is_linear and key == "weight":
                if style is None and partition.is_strict:
                    raise ParameterError(
                        f"tensor_parallel.partition_config: no spec matches {parameter}, which its "
                        "strict_mode asks for"
                    )
                if style not in (None, "replicate"):
                    found[name] = str(style)
    if {summed}.issuperset(found.values()):
        raise ParameterError(
            f"tensor_parallel.partition_config: no spec splits a linear layer of {type(model).__name__}; its "
            "patterns are regular expressions for names of weights from their beginning"
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


# -- full states -----------------------------------------------------------------------------------
#
# Lets ``state_dict`` give full tensors, and ``load_state_dict`` take them, of a model that is sharded.


class _FullState:
    """Replaces a module's shards in its state by full tensors: a hook; collective for the axis."""

    def __init__(self, specs: dict[str, ShardSpec]) -> None:
        self._specs = specs

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, spec in self._specs.items():
            if prefix + name in state:
                state[prefix + name] = spec.unshard(state[prefix + name])


class _ShardedState:
    """Replaces full tensors in a state by a module's shards before it is loaded: a hook."""

    def __init__(self, specs: dict[str, ShardSpec]) -> None:
        self._specs = specs

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, spec in self._specs.items():
            value = state.get(prefix + name)
            if value is not None and tuple(value.shape) == spec.shape:
                state[prefix + name] = spec.shard(value)


def keep_states_full(model: nn.Module) -> None:
    """Install the hooks on every module with parameters that are sharded."""
    for module in model.modules():
        found = {name: spec_of(p) for name, p in module._parameters.items() if p is not None}
        specs = {name: spec for name, spec in found.items() if spec is not None}
        if specs:
            module.register_state_dict_post_hook(_FullState(specs))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_ShardedState(specs))  # type: ignore[no-untyped-call]
