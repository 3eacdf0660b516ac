"""Train LoRA adapters of a 7B model with reinforcement learning (GRPO, trl). Needs: pip install trl peft

cd examples/recipes
zlaunch --num_gpus 8 grpo.py --deepspeed grpo_7b.json --model ORG/MODEL --output_dir out

The reward counts the word "the" in an answer: replace `reward` with your own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from finetune import HERE
from peft import LoraConfig, TaskType
from recipe import TINY_STEPS, build, use_cpu_if_needed
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Recipe:
    """Select the model."""

    model: str = field(default=str(HERE / "models/llama-7b"), metadata={"help": "Hub name or folder"})
    tiny: bool = field(default=False, metadata={"help": "train a tiny model for a few steps, also on CPU"})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each answer."""
    return [float(answer.count("the")) for answer in completions]


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer for the tiny variant, without a download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {name: index for index, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<pad>": 256, "<end>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    """Train, and save the adapters."""
    use_cpu_if_needed()
    if "--tiny" in sys.argv:
        sys.argv += ["--max_steps", str(TINY_STEPS), "--num_generations", "2", "--max_completion_length", "8"]
        sys.argv += ["--per_device_train_batch_size", "2", "--save_strategy", "no"]
    parser = HfArgumentParser((Recipe, GRPOConfig))  # type: ignore[arg-type]
    recipe, training = parser.parse_args_into_dataclasses()
    tokenizer = bytes_tokenizer() if recipe.tiny else AutoTokenizer.from_pretrained(recipe.model)
    prompts = [{"prompt": f"Write a sentence about the number {number}: "} for number in range(512)]
    trainer = GRPOTrainer(
        model=build(recipe.model, tiny=recipe.tiny),
        args=training,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM
        ),
    )
    result = trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
