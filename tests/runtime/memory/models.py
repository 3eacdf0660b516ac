"""Build small models of many kinds, each with the input that `zlaunch estimate` and a real step are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = "tests.runtime.memory.models"
VOCAB, TOKENS = 512, 256
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": TOKENS}


@dataclass(frozen=True)
class Kind:
    """Names a config of transformers, or a function of this file and the shape of its input."""

    config: str = ""
    values: dict[str, Any] | None = None
    build: str = ""
    shape: str = ""
    samples: int = 2
    """Counts the samples of a language model's micro-batch."""


def mlp() -> nn.Module:
    return Chain([Feedforward(128) for _ in range(6)])


class Feedforward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Runs blocks one after the other, and a head on their result's mean."""

    def __init__(self, blocks: list[nn.Module], first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """Adds two convolutions with batch norms to its input, as a ResNet's block does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm_one(self.one(x)))
        return torch.relu(x + self.norm_two(self.two(hidden)))


def conv_net() -> nn.Module:
    return Chain([Residual(64) for _ in range(5)], nn.Conv2d(3, 64, 3, padding=1))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
    )
    return ViTForImageClassification(config)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
    layer.self_attn.dropout = 0.0  # as below
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def lstm() -> nn.Module:
    return Recurrent()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 128)
        self.layers = nn.LSTM(128, 192, num_layers=2, batch_first=True)
        self.head = nn.Linear(192, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x))[0])


# No dropout in attention: it takes a matrix of scores on a CPU. Estimates are of GPUs, where it does not.
KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", SMALL),
    "qwen3": Kind("Qwen3ForCausalLM", {**SMALL, "head_dim": 32}),
    "mistral": Kind("MistralForCausalLM", SMALL),
    # With fewer samples the peak would be where gloo sums gradients, in a buffer that NCCL does without.
    "mixtral": Kind("MixtralForCausalLM", {**SMALL, "num_local_experts": 4}, samples=4),
    "gpt2": Kind("GPT2LMHeadModel", {**GPT2, "attn_pdrop": 0.0}),
    "opt": Kind(
        "OPTForCausalLM",
        {
            **SMALL,
            "ffn_dim": 512,
            "word_embed_proj_dim": 128,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "attention_dropout": 0.0,
        },
    ),
    "gpt_neox": Kind("GPTNeoXForCausalLM", {**SMALL, "intermediate_size": 512}),
    "bert": Kind(
        "BertForMaskedLM",
        {**SMALL, "intermediate_size": 512, "attention_probs_dropout_prob": 0.0},
        samples=4,
    ),
    "t5": Kind(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 128,
            "d_ff": 512,
            "num_layers": 3,
            "num_heads": 4,
            "d_kv": 32,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
    "mlp": Kind(build="mlp", shape="1024,128"),
    "conv_net": Kind(build="conv_net", shape="8,3,32,32"),
    "vit": Kind(build="vit", shape="8,3,64,64"),
    "encoder": Kind(build="encoder", shape="4,128,128"),
    "lstm": Kind(build="lstm", shape="4,128:int64"),
}


def builder(kind: Kind, save: Path | None = None) -> Callable[[], nn.Module]:
    """Return what builds the model of a kind; write its config of transformers to a folder."""
    if kind.build:
        made: Callable[[], nn.Module] = globals()[kind.build]
        return made
    import transformers

    model: Any = getattr(transformers, kind.config)
    config = model.config_class(**(kind.values or {}))
    if save is not None:
        config.architectures = [kind.config]
        config.save_pretrained(save)
    return lambda: model(config)
