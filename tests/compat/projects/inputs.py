"""Makes the tiny models, texts and configs that the scripts of other projects train on."""

from __future__ import annotations

import importlib
import json
import random
import struct
from pathlib import Path
from typing import Any

_RATE = {"lr": "auto", "weight_decay": "auto"}
_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
_STAGE_3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
_AXOLOTL: dict[str, Any] = {
    "output_dir": "./out",
    "special_tokens": {"pad_token": "<pad>"},
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 5,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 0.001,
    "lr_scheduler": "constant",
    "logging_steps": 1,
    "val_set_size": 0.0,
    "seed": 42,
    "use_cpu": True,
    **dict.fromkeys(("bf16", "fp16", "tf32"), False),
}


def _words(row: int, count: int) -> str:
    return " ".join(f"word{(7 * row + place**2) % 97}" for place in range(count))


def _chat(row: int) -> dict[str, Any]:
    said = [{"role": "user", "content": _words(row, 6)}, {"role": "assistant", "content": _words(row + 1, 6)}]
    return {"messages": said}


def _make_mnist(folder: Path) -> None:
    """Write random images and labels in MNIST's format, as many as it has."""
    draws = random.Random(0)
    folder.mkdir(parents=True)
    for kind, count in (("train", 60_000), ("t10k", 10_000)):
        images = struct.pack(">4i", 2051, count, 28, 28) + draws.randbytes(count * 28 * 28)
        labels = struct.pack(">2i", 2049, count) + bytes(number % 10 for number in range(count))
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(labels)


def make_inputs(folder: Path) -> None:
    """Fill a folder with models (``opt``, ``llama``, ``critic``), ``text``, ``mnist`` and configs
    (``ds_*.json``,
    ``axolotl.json``).
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer

    transformers: Any = importlib.import_module("transformers")
    words = [f" word{number} Human Assistant : Instruction Response" for number in range(100)]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special |= {"mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        words, vocab_size=384, special_tokens=["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(folder))
    tokenizer = transformers.GPT2TokenizerFast(
        str(folder / "vocab.json"), str(folder / "merges.txt"), **special
    )
    sizes: dict[str, Any] = {"vocab_size": 384, "hidden_size": 32, "max_position_embeddings": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **sizes))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=64, **sizes))
    for name, model in (("opt", opt), ("llama", llama)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # a reward model as DeepSpeed-Chat's step 2 saves it
    opt.config.save_pretrained(folder / "critic")
    tokenizer.save_pretrained(folder / "critic")
    values = {f"rwtransformer.{name}": value for name, value in opt.model.state_dict().items()}
    values["v_head.weight"] = torch.full((1, 32), 0.1)
    torch.save(values, folder / "critic/pytorch_model.bin")

    (folder / "text").mkdir(exist_ok=True)
    rows = [json.dumps({"text": _words(row, 12)}) for row in range(64)]
    (folder / "text/train.json").write_text("\n".join(rows))
    (folder / "text/chat.jsonl").write_text("\n".join(map(json.dumps, map(_chat, range(64)))))
    _make_mnist(folder / "mnist/MNIST/raw")
    optimizer = {"optimizer": {"type": "AdamW", "params": _RATE}}
    scheduler = {"scheduler": {"type": "WarmupLR", "params": _WARMUP}}
    (folder / "ds_auto.json").write_text(json.dumps({**_STAGE_3, **optimizer, **scheduler}))
    (folder / "ds_script.json").write_text(json.dumps(_STAGE_3))
    (folder / "axolotl.json").write_text(json.dumps({**_AXOLOTL, **_axolotl_places(folder)}))


def _axolotl_places(folder: Path) -> dict[str, Any]:
    text = {"path": str(folder / "text/train.json"), "ds_type": "json", "type": "completion", "field": "text"}
    return {"base_model": str(folder / "llama"), "datasets": [text]}


def make_chat(root: Path) -> None:
    """Write the conversations that DeepSpeed-Chat's ``local/jsonfile`` reads."""
    (root / "data").mkdir(exist_ok=True)
    for name, count in (("train", 48), ("eval", 8)):
        rows = [
            {
                "prompt": f"Human: {_words(row, 6)} Assistant:",
                "chosen": f" {_words(row + 1, 5 + row % 4)}",
                "rejected": f" {_words(row + 2, 5 + row % 3)}",
            }
            for row in range(count)
        ]
        (root / f"data/{name}.json").write_text("\n".join(map(json.dumps, rows)))


def make_characters(root: Path) -> None:
    """Write the text of nanoGPT's ``data/shakespeare_char``, whose ``prepare.py`` would download it."""
    draws = random.Random(0)
    text = "".join(draws.choice("abcdefgh \n") for _ in range(20_000))
    (root / "data/shakespeare_char/input.txt").write_text(text)
