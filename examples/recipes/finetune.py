"""Fine-tune a 7B model with the Hugging Face Trainer: all parameters, or LoRA adapters.

cd examples/recipes
zlaunch --num_gpus 8 finetune.py --deepspeed full_7b.json --model ORG/MODEL --output_dir out
zlaunch --num_gpus 1 finetune.py --lora --deepspeed lora_7b.json --model ORG/MODEL --output_dir out
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from recipe import TINY_LENGTH, TINY_STEPS, PackedText, build, documents, use_cpu_if_needed
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

HERE = Path(__file__).parent


@dataclass
class Recipe:
    """Select the model, its adapters and the data."""

    model: str = field(
        default=str(HERE / "models/llama-7b"),
        metadata={"help": "Hub name or folder; with only a config.json: random weights"},
    )
    lora: bool = field(default=False, metadata={"help": "train LoRA adapters of all linear layers"})
    data: str | None = field(default=None, metadata={"help": "folder of .txt, .md or .py files"})
    length: int = field(default=4096, metadata={"help": "tokens per row"})
    rows: int = field(default=1024, metadata={"help": "rows of the training set"})
    tiny: bool = field(default=False, metadata={"help": "train a tiny model for a few steps, also on CPU"})


def with_lora(model: nn.Module) -> nn.Module:
    """Freeze a model, and add LoRA adapters to every linear layer except the head."""
    from peft import LoraConfig, TaskType, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
    return get_peft_model(model, adapters)


def lora_7b() -> nn.Module:
    """Build the model of the LoRA recipe: for `zlaunch estimate`."""
    return with_lora(build(Recipe().model, tiny=False))


def main() -> None:
    """Train, and save what was trained."""
    use_cpu_if_needed()
    if "--tiny" in sys.argv:
        sys.argv += ["--max_steps", str(TINY_STEPS), "--logging_steps", "1"]
    parser = HfArgumentParser((Recipe, TrainingArguments))  # type: ignore[arg-type]
    recipe, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    length, rows = (TINY_LENGTH, 64) if recipe.tiny else (recipe.length, recipe.rows)
    model: nn.Module = build(recipe.model, tiny=recipe.tiny)
    text = PackedText(documents(recipe.model, recipe.data, tiny=recipe.tiny), length, rows)
    if recipe.lora:
        model = with_lora(model)
    trainer = Trainer(model=model, args=training, train_dataset=text)
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"training loss {result.training_loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
