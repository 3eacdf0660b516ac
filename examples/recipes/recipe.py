"""Build the model, its tiny variant and packed text for all recipes."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

TINY_LENGTH, TINY_STEPS = 64, 3
_TINY = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256},
}
_END = 0
"""Token between documents for a model without a tokenizer. Text is bytes then and never contains it."""


def architecture(model: str, *, tiny: bool) -> PretrainedConfig:
    """Return the config of a model folder or Hub name; ``tiny`` keeps the family and shrinks the sizes."""
    config = AutoConfig.from_pretrained(model)
    if tiny:
        config.update({name: value for name, value in _TINY.items() if hasattr(config, name)})
    return config


def build(model: str, *, tiny: bool) -> PreTrainedModel:
    """Return the pretrained model. ``tiny``, or a folder with only a config.json, gives random weights."""
    config = architecture(model, tiny=tiny)
    if tiny or (os.path.isdir(model) and os.listdir(model) == ["config.json"]):
        return AutoModelForCausalLM.from_config(config)
    return AutoModelForCausalLM.from_pretrained(model)


class PackedText(Dataset[dict[str, Tensor]]):
    """Concatenate documents and split them into rows of equal length, without padding.

    `position_ids` start at 0 in each document. Hugging Face models use them to separate the documents of a
    row, so attention stays inside a document.
    """

    def __init__(self, documents: Iterator[Tensor], length: int, rows: int) -> None:
        tokens: list[Tensor] = []
        places: list[Tensor] = []
        missing = rows * length
        for document in documents:
            tokens.append(document[:missing])
            places.append(torch.arange(len(tokens[-1])))
            missing -= len(tokens[-1])
            if missing == 0:
                break
        count = sum(map(len, tokens)) // length * length
        if not count:
            raise SystemExit(f"the documents have fewer than {length} tokens: pass more --data")
        self.tokens = torch.cat(tokens)[:count].view(-1, length)
        self.places = torch.cat(places)[:count].view(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "position_ids": self.places[index], "labels": row}


def documents(model: str, data: str | None, *, tiny: bool) -> Iterator[Tensor]:
    """Yield the tokens of each text file of a folder, by default of Python's standard library."""
    folder = Path(data or sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*") if path.suffix in (".txt", ".md", ".py"))
    if not files:
        raise SystemExit(f"--data {folder}: no .txt, .md or .py files found")
    has_tokenizer = not tiny and not (os.path.isdir(model) and not Path(model, "tokenizer.json").exists())
    tokenizer = AutoTokenizer.from_pretrained(model) if has_tokenizer else None
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if tokenizer is None:
            yield torch.tensor([*text.encode(), _END])
        else:
            yield torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])


def use_cpu_if_needed() -> None:
    """Make accelerate use the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        sys.argv.append("--use_cpu")
