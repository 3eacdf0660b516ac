"""``deepspeed.moe.layer.MoE``: a mixture of equal experts, each of which takes so many tokens."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from zlaunch.compat.deepspeed import routing
from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.expert_parallel.experts import Experts

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
        self.k, self.capacity_factor, self.eval_capacity_factor = k, capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens, self.use_rts = min_capacity, drop_tokens, use_rts
        self.noisy_gate_policy = noisy_gate_policy
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.draws_random_numbers = k <= 2

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> routing.Routing:
        """Route tokens, (n, width). Tokens whose ``used_token``, (n,), is 0 go to no expert where k is 1."""
        wide = input.float()
        if self.training and self.noisy_gate_policy == "Jitter":
            wide = wide * (1 - _JITTER + torch.rand_like(wide) * (2 * _JITTER))
        with torch.autocast(input.device.type, enabled=False):
            logits = nn.functional.linear(wide, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = None
        if self.drop_tokens:
            capacity = routing.capacity_of(len(logits), logits.shape[1], factor * self.k, self.min_capacity)
        if self.k == 1:
            is_noisy = self.training and self.noisy_gate_policy == "RSample"
            used = None if used_token is None else used_token.reshape(-1)
            return routing.route_to_one(logits, capacity, used, is_noisy, self.use_rts)
        if self.k == 2:
            return routing.route_to_two(logits, capacity, self.top2_2nd_expert_sampling)
        return routing.route_to_several(logits, self.k, capacity)


class MOELayer(nn.Module):
    """Sends tokens to the experts that the gate has chosen, and sums their weighted outputs."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: Any = None
        self.exp_counts: Any = None

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return the mixture for tokens of any leading shape, in their shape and dtype."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        found = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = found.l_aux, found.exp_counts
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
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
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
