"""``deepspeed.moe.layer.MoE``: a mixture of equal experts, each of which takes so many tokens."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions.gumbel import Gumbel

from zlaunch.compat.deepspeed.missing import EXPERTS, NotInZlaunch
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.expert import Experts

# -- routing ----------------------------------------------------------------------------------------
#
# Routes tokens to experts by the formulas of DeepSpeed's gates, with their capacities and random numbers.


DROPPED = -1
"""Stands for an expert that has no room for a token."""


@dataclass(slots=True)
class Routing:
    """Holds which experts each token goes to."""

    index: Tensor
    """Numbers of experts, (tokens, k), or DROPPED."""
    weights: Tensor
    """What the experts' outputs are multiplied by, (tokens, k), float32."""
    l_aux: Tensor
    """The loss that balances the experts, a scalar."""
    exp_counts: Tensor
    """How many tokens chose each expert, those without room included, (experts,)."""


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
    """Return how many tokens an expert takes: its even share times a factor, at least ``least``."""
    return max(math.ceil(tokens / experts * factor), least)


def route_to_one(
    logits: Tensor, capacity: int | None, used: Tensor | None, with_noise: bool, at_random: bool
) -> Routing:
    """Route each token to its likeliest expert, with its probability as weight.

    ``logits``: (tokens, experts). ``capacity`` None drops no token. ``used``: (tokens,), 0 for a token that
    goes to none. ``with_noise`` chooses by logits with Gumbel noise. ``at_random``: an expert without room
    takes tokens by chance, otherwise the first ones.
    """
    noisy = logits + _gumbel(logits) if with_noise else None
    gates = logits.softmax(1)
    chosen = (gates if noisy is None else noisy).argmax(1, keepdim=True)
    mask = _mask(gates, chosen)
    if used is not None:
        mask = mask * used.to(mask.dtype).unsqueeze(1)
    counts = mask.sum(0).detach()
    l_aux = (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]
    if at_random:
        priority = mask * torch.rand(mask.shape, device=mask.device)
    else:
        priority = mask.float()
    mask = mask * _first(priority, len(gates) if capacity is None else capacity)
    return _routing(gates, chosen, mask, l_aux, counts)


def route_to_two(logits: Tensor, capacity: int | None, sample_second: bool) -> Routing:
    """Route each token to two experts, with probabilities that sum to 1 as weights.

    ``sample_second`` draws the second expert from the rest. The first choices of all tokens come before the
    second ones, and tokens in their order, where an expert has no room for all.
    """
    gates = logits.softmax(1)
    first = gates.argmax(1, keepdim=True)
    one = _mask(gates, first)
    if sample_second:
        logits = logits + _gumbel(logits)
    second = logits.masked_fill(one.bool(), -math.inf).argmax(1, keepdim=True)
    two = _mask(gates, second)
    before = one.sum(0)
    l_aux = (gates.mean(0) * one.float().mean(0)).mean() * gates.shape[1] ** 2
    counts = (one + two).detach().sum(0)
    if capacity is not None:
        places = two.cumsum(0) - 1 + before
        one = one * (one.cumsum(0) <= capacity)
        two = two * (places < capacity)
    found = _routing(gates, torch.cat([first, second], 1), one + two, l_aux, counts)
    found.weights = _normalised(found.weights)
    return found


def route_to_several(logits: Tensor, k: int, capacity: int | None) -> Routing:
    """Route each token to its k likeliest experts, with probabilities that sum to 1 over those with room.

    An expert without room for all takes the tokens with the largest probabilities.
    """
    gates = logits.softmax(1)
    largest, chosen = gates.topk(k, dim=1)
    mask = _mask(gates, chosen)
    counts = mask.detach().sum(0)
    l_aux = (gates.mean(0) * mask.float().mean(0)).mean() * gates.shape[1] ** 2 / k
    if capacity is not None:
        priority = torch.zeros_like(gates).scatter(1, chosen, largest).detach()
        mask = mask * _first(priority, capacity)
    found = _routing(gates, chosen, mask, l_aux, counts)
    found.weights = _normalised(found.weights)
    return found


def _gumbel(like: Tensor) -> Tensor:
    zero, one = (torch.tensor(value, device=like.device) for value in (0.0, 1.0))
    noise: Tensor = Gumbel(zero, one).rsample(like.shape)
    return noise


def _mask(gates: Tensor, chosen: Tensor) -> Tensor:
    """Return 1 where a token has chosen an expert, (tokens, experts), int64."""
    return torch.zeros_like(gates, dtype=torch.long).scatter(1, chosen, 1)


def _first(priority: Tensor, capacity: int) -> Tensor:
    """Return 1 for the tokens of the highest priority for each expert, the earlier ones among equals."""
    order = priority.detach().sort(dim=0, descending=True, stable=True).indices[:capacity]
    return torch.zeros_like(priority, dtype=torch.long).scatter(0, order, 1)


def _routing(gates: Tensor, chosen: Tensor, mask: Tensor, l_aux: Tensor, counts: Tensor) -> Routing:
    kept = mask.gather(1, chosen) > 0
    weights = gates.gather(1, chosen) * kept
    return Routing(chosen.masked_fill(~kept, DROPPED), weights, l_aux, counts)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)


# -- moe --------------------------------------------------------------------------------------------


logger = logging.getLogger("DeepSpeed")
_NOISE = (None, "None", "Jitter", "RSample")
_JITTER = 0.01


class TopKGate(nn.Module):
    """Chooses the experts of each token, in float32."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Make the linear layer ``wg``, without a bias. Raises ParameterError for an unknown policy or k."""
        super().__init__()
        if noisy_gate_policy not in _NOISE:
            raise ParameterError(f"MoE: noisy_gate_policy is {noisy_gate_policy!r}, not one of {_NOISE[1:]}")
        if not 1 <= k <= num_experts:
            raise ParameterError(f"MoE: k is {k}, expected 1 to {num_experts} (num_experts)")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.noisy_gate_policy = noisy_gate_policy
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.draws_random_numbers = k <= 2

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens, (n, width). Tokens whose ``used_token``, (n,), is 0 go to no expert where k is 1."""
        wide = input.float()
        if self.training and self.noisy_gate_policy == "Jitter":
            wide = wide * (1 - _JITTER + torch.rand_like(wide) * (2 * _JITTER))
        with torch.autocast(input.device.type, enabled=False):
            logits = nn.functional.linear(wide, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = None
        if self.drop_tokens:
            capacity = capacity_of(len(logits), logits.shape[1], factor * self.k, self.min_capacity)
        if self.k == 1:
            is_noisy = self.training and self.noisy_gate_policy == "RSample"
            used = None if used_token is None else used_token.reshape(-1)
            return route_to_one(logits, capacity, used, is_noisy, self.use_rts)
        if self.k == 2:
            return route_to_two(logits, capacity, self.top2_2nd_expert_sampling)
        return route_to_several(logits, self.k, capacity)


class MOELayer(nn.Module):
    """Sends tokens to the experts that the gate has chosen, and sums their weighted outputs."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.l_aux: Any = None
        self.exp_counts: Any = None

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return the mixture for tokens of any leading shape, in their shape and dtype."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        found = self.gate(tokens, used_token)
        self.l_aux = found.l_aux
        self.exp_counts = found.exp_counts
        mixed: Tensor = self.experts(tokens, found.index, found.weights)
        return mixed.reshape(hidden.shape)


class MoE(nn.Module):
    """Computes a mixture of copies of an expert. ``ep_size`` ranks have different ones of them, which
    ``initialize`` takes over as ``parallel.expert`` of the config; until then each rank has all.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Take DeepSpeed's arguments. ``expert`` gets (n, hidden_size) and returns that shape.

        Raises NotInZlaunch for ``enable_expert_tensor_parallelism``, ParameterError for sizes that do not
        fit.
        """
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise NotInZlaunch(
                "deepspeed.moe.layer.MoE(enable_expert_tensor_parallelism=True) is not supported: each "
                "expert lies whole on one rank; parallel.tensor shards only the other layers"
            )
        if ep_size < 1 or num_experts % ep_size:
            raise ParameterError(f"MoE: {num_experts} experts cannot be divided by ep_size = {ep_size} ranks")
        if use_tutel:
            logger.warning("MoE: use_tutel changes nothing: the routing is computed with torch")
        self.use_residual = use_residual
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        experts = Experts([copy.deepcopy(expert) for _ in range(num_experts)])
        for parameter in experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]  # DeepSpeed's marks of an expert
            parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]
        self.deepspeed_moe = MOELayer(gate, experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: ``initialize`` gives ranks their experts.

        Raises NotInZlaunch for the other order of ranks.
        """
        if use_data_before_expert_parallel_:
            raise NotInZlaunch(
                "use_data_before_expert_parallelism is not supported: "
                "consecutive ranks have different experts"
            )

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixture, in the shape of ``hidden_states``, the loss that balances the experts, and how
        many tokens of this rank chose each expert, (num_experts,).
        """
        mixed = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            own = self.mlp(hidden_states)
            own = own[0] if isinstance(own, tuple) else own
            share = self.coefficient(hidden_states).softmax(-1)
            mixed = mixed * share[..., 0:1] + own * share[..., 1:]
        return mixed, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


# -- experts ----------------------------------------------------------------------------------------
#
# Param groups by whether parameters are experts' of DeepSpeed's ``MoE`` layer.


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
