"""Make layers that cases on the pretended GPU train, of which ranks have parts."""

from __future__ import annotations

from typing import Any


def mixture(width: int) -> Any:
    """Make a layer of four experts, of which each token goes to two."""
    from torch import nn

    import zlaunch
    from tests.runtime.models import Layer

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(width, 4)
            self.experts = zlaunch.Experts([Layer(width) for _ in range(4)])

        def forward(self, hidden: Any) -> Any:
            tokens = hidden.flatten(0, 1)
            weights, index = self.gate(tokens).float().softmax(-1).topk(2)
            return hidden + self.experts(tokens, index, weights).view_as(hidden)

    return Mixture()


def attending(width: int) -> Any:
    """Make a layer of attention on sequences that ranks may have parts of."""
    from torch import nn

    from zlaunch.sequence import attention

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, hidden: Any) -> Any:
            parts = self.inner(hidden).chunk(3, -1)
            query, key, value = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in parts)
            return hidden + self.out(attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))

    return Attending()


def llama(width: int) -> Any:
    """Make a model between whose layers ranks may divide the tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
    )


def loss_of_llama(model: Any, tokens: Any) -> Any:
    """Return the mean cross entropy of an even number of tokens."""
    return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


def loss_of_logits(logits: Any, labels: Any) -> Any:
    """Return the mean cross entropy."""
    from torch.nn import functional

    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def loss_of_parts(model: Any, tokens: Any) -> Any:
    """Return the loss of whole sequences, of which this rank computes its part."""
    from torch.nn import functional

    from zlaunch.sequence import mean, split

    logits = model(split(tokens[:, :-1])).float().flatten(0, 1)
    return mean(functional.cross_entropy(logits, split(tokens[:, 1:]).flatten(), reduction="none"))
