"""Makes tiny Hugging Face models in float64, and trains them in one process or by an engine."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.runtime.tensor_parallel.task import BATCH, EPS, STEPS, data

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "phi": {},
    "olmo": {},
    "olmo2": {},
    "mixtral": MOE,
    "qwen3_moe": {**MOE, "head_dim": 8},
    "phi3": {},
    "deepseek_v2": {
        **MOE,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
        **{"n_shared_experts": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    },
    "gpt_oss": {**MOE, "head_dim": 8},
    "mamba": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make(family: str, attention: str = "eager", **changes: Any) -> Any:
    """Make a tiny model of a family in float64, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    plainly = {"attn_implementation": attention, "experts_implementation": "eager"}
    AutoModelForCausalLM.from_config(config, **plainly)  # loads its files
    _compute_in_float64()
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, **plainly).double()


class _WideTorch:
    """Stands for torch in the models' files, which compute norms, softmax and losses in float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def _compute_in_float64() -> None:
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # in a worker of this test alone
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and getattr(module, "torch", None) is torch:
            module.torch = _WideTorch()  # type: ignore[attr-defined]  # it has that name


def shapes(family: str, **changes: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's state, in a worker: :func:`make` changes torch for its process."""
    return {name: tuple(value.shape) for name, value in make(family, **changes).state_dict().items()}


def plain(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=EPS)
    losses = []
    for batch in data():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(engine: Any, tensor: int, first: int = 0, last: int = STEPS) -> list[float]:
    """Train on this rank's samples; return the mean losses of all ranks."""
    world = torch.distributed.get_world_size()
    position, size = torch.distributed.get_rank() // tensor, world // tensor
    losses = []
    for batch in data()[first:last]:
        own = batch[position * BATCH // size : (position + 1) * BATCH // size]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses
