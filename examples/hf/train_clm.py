"""Train a small Llama from its config with the Hugging Face Trainer, without a download.

zlaunch --num_gpus 2 examples/hf/train_clm.py --deepspeed examples/hf/ds_stage2.json

An ordinary Trainer script: without --deepspeed it runs as plain Hugging Face, and under DeepSpeed's own
launcher as it does here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import load_text


@dataclass
class Model:
    """Set the size of the model."""

    hidden_size: int = field(default=128)
    num_hidden_layers: int = field(default=4)
    context: int = field(default=128)
    start: str | None = field(default=None, metadata={"help": "folder of a model to start from"})


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Return consecutive windows of a byte text."""

    def __init__(self, text: torch.Tensor, context: int, count: int) -> None:
        self.windows = text[: context * count].long().view(-1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    parser = HfArgumentParser((Model, TrainingArguments))  # type: ignore[arg-type]
    if "--output_dir" not in sys.argv:
        sys.argv += ["--output_dir", "out/hf"]
    if not torch.cuda.is_available():
        sys.argv += ["--use_cpu"]  # otherwise accelerate takes every process for a run of its own
    given, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    size = LlamaConfig(
        vocab_size=256,
        hidden_size=given.hidden_size,
        intermediate_size=2 * given.hidden_size,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=given.context,
    )
    if given.start is not None:
        model = AutoModelForCausalLM.from_pretrained(given.start)
    else:
        model = AutoModelForCausalLM.from_config(size)
    train, validation = load_text()
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Windows(train, given.context, 4096),
        eval_dataset=Windows(validation, given.context, 64),
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    measured: dict[str, Any] = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(
            f"training loss {result.training_loss:.4f}, validation loss {measured['eval_loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
