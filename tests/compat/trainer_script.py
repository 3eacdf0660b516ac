"""Run scenes of the Hugging Face Trainer that check themselves: ``trainer_script.py FOLDER SCENE ...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer, TrainingArguments, set_seed
from transformers.integrations import HfDeepSpeedConfig  # type: ignore[attr-defined]
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

FOLDER = sys.argv[1]
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def config(stage: int, *, optimizer: bool = True, scheduler: bool = False, **zero: Any) -> dict[str, Any]:
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    section = {
        "stage": stage,
        "stage3_gather_16bit_weights_on_model_save": True,
        **dict.fromkeys(sizes, "auto"),
    }
    keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    found: dict[str, Any] = {**dict.fromkeys(keys, "auto"), "zero_optimization": {**section, **zero}}
    found |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "steps_per_print": float("inf")}
    if optimizer:
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        found["optimizer"] = {"type": "AdamW", "params": params}
    if scheduler:
        params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        found["scheduler"] = {"type": "WarmupLR", "params": params}
    return found


def small(kind: str = "llama") -> Any:
    ids: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":  # tied weights
        return GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **ids)
    ids |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **ids)


def make(name: str, given: Any, *, kind: str = "llama", model: Any = None, **options: Any) -> Trainer:
    unset_hf_deepspeed_config()
    values = {
        "output_dir": f"{FOLDER}/{name}",
        "max_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        **options,
    }
    arguments = TrainingArguments(deepspeed=given, **values)
    set_seed(3)
    model = model() if model is not None else AutoModelForCausalLM.from_config(small(kind))
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def model_of(trainer: Trainer) -> Any:
    """Returns the trainer's model, whose class transformers does not tell."""
    return trainer.model


def resume() -> None:
    """A straight run, one resumed half-way; what is saved is what plain transformers loads."""
    for stage, kind in ((1, "llama"), (2, "gpt2"), (3, "llama"), (3, "gpt2")):
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "warmup_steps": 2, "kind": kind}
        name = f"{kind}{stage}"
        straight = make(name, config(stage, scheduler=True), **options)
        straight.train()
        resumed = make(name, config(stage, scheduler=True), **options)
        resumed.train(resume_from_checkpoint=f"{FOLDER}/{name}/checkpoint-2")
        assert losses(resumed) == losses(straight)
        resumed.save_model(f"{FOLDER}/model_{name}")
        trained = resumed.accelerator.get_state_dict(resumed.model_wrapped)
        torch.distributed.barrier()
        unset_hf_deepspeed_config()
        plain = AutoModelForCausalLM.from_pretrained(f"{FOLDER}/model_{name}").state_dict()
        if RANK == 0:
            assert trained.keys() == plain.keys()
            assert all(torch.equal(value, plain[name]) for name, value in trained.items())


def whose_optimizer() -> None:
    """DeepSpeed's or the Trainer's optimizer and schedule, with and without offload: one curve."""
    cpu = {"offload_optimizer": {"device": "cpu"}}
    for stage in (2, 3):
        curves = []
        for optimizer, scheduler, zero in ((True, True, cpu), (False, True, {}), (True, True, {})):
            given = config(stage, optimizer=optimizer, scheduler=scheduler, **zero)
            trainer = make("whose", given, warmup_steps=2, max_steps=3)
            trainer.train()
            curves.append(losses(trainer))
        assert curves[0] == curves[2]
        assert max(abs(a - b) for a, b in zip(curves[1], curves[2], strict=True)) < 1e-4
    make("whose", config(2, optimizer=False), gradient_accumulation_steps=2, max_steps=2).train()


def adafactor() -> None:
    """The Trainer's Adafactor with offload has the curve that it has without."""
    cpu = {"offload_optimizer": {"device": "cpu"}}
    pairs: Any = (((0, {}), (2, cpu)), ((3, {}), (3, cpu)))
    for pair in pairs:
        curves = []
        for stage, zero in pair:
            given = config(stage, optimizer=False, **zero)
            # Otherwise accelerate replaces it by Adam where it is offloaded.
            given["zero_force_ds_cpu_optimizer"] = False
            trainer = make("adafactor", given, optim="adafactor", learning_rate=1e-2, max_steps=6)
            trainer.train()
            assert type(getattr(trainer.optimizer, "optimizer", None)).__name__ == "Adafactor"
            curves.append(losses(trainer))
        assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4, curves


def sharing() -> None:
    """Two ranks that share each layer have the losses of two with samples of their own, and save the same."""
    curves = []
    for size in (1, 2):
        given = {**config(1), "tensor_parallel": {"autotp_size": size}}
        trainer = make(f"sharing{size}", given, per_device_train_batch_size=2 * size, max_steps=3)
        trainer.train()
        curves.append(losses(trainer))
        trainer.save_model(f"{FOLDER}/shared{size}")
        evaluated = trainer.evaluate()["eval_loss"]
        curves[-1].append(evaluated)
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4, curves
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    one, other = (
        AutoModelForCausalLM.from_pretrained(f"{FOLDER}/shared{size}").state_dict() for size in (1, 2)
    )
    assert all(torch.allclose(value, other[name], atol=1e-4) for name, value in one.items())


def sequences() -> None:
    """Two ranks that share sequences, two batches a step, have the losses of two with own samples."""
    from accelerate.parallelism_config import ParallelismConfig

    curves = []
    for size in (1, 2):
        asked: dict[str, Any] = {}
        if size == WORLD:
            asked["parallelism_config"] = ParallelismConfig(sp_size=size, sp_backend="deepspeed")
        stage3 = config(3, stage3_param_persistence_threshold=0)
        trainer = make(f"sequences{size}", stage3, gradient_accumulation_steps=size, max_steps=3, **asked)
        trainer.train()
        curves.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
        trainer.save_model(f"{FOLDER}/divided{size}")
        AcceleratorState._reset_state()
    assert WORLD == 1 or max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4, curves


def precision() -> None:
    for option, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        enabled: dict[str, Any] = {option: True}
        trainer = make(option, config(3), max_steps=2, **enabled)
        trainer.train()
        assert next(model_of(trainer).parameters()).dtype == dtype
        assert all(4 < loss < 6 for loss in losses(trainer))


def best() -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    trainer = make("best", config(3), load_best_model_at_end=True, eval_steps=2, **options)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


def evaluation_alone() -> None:
    assert 4 < make("evaluation", config(3)).evaluate()["eval_loss"] < 6


def generation() -> None:
    """After training at stage 3, on ranks that want texts of different lengths."""
    trainer = make("generation", config(3, stage3_param_persistence_threshold=0), max_steps=1)
    trainer.train()
    prompt = torch.tensor([[1, 5, 6]])
    length = 4 + 5 * RANK
    text = model_of(trainer).generate(
        prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0
    )
    assert text.shape == (1, 3 + length)


def inference() -> None:
    """Stage 3 without an optimizer, parameters offloaded; HfDeepSpeedConfig without the Trainer."""
    unset_hf_deepspeed_config()
    prompt = torch.tensor([[1, 5, 6]])
    if RANK == 0:
        AutoModelForCausalLM.from_config(small()).save_pretrained(f"{FOLDER}/saved")
    torch.distributed.barrier()
    plain: Any = AutoModelForCausalLM.from_pretrained(f"{FOLDER}/saved")
    length = 3 + 4 * RANK
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(prompt, **options)
    places: list[dict[str, Any]] = [{}, {"offload_param": {"device": "cpu"}}]
    places.append({"offload_param": {"device": "nvme", "nvme_path": f"{FOLDER}/nvme"}})
    for place in places:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **place}
        given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        alive = HfDeepSpeedConfig(given)
        model = AutoModelForCausalLM.from_pretrained(f"{FOLDER}/saved")
        parameters: list[Any] = list(model.parameters())
        sharded = [p for p in parameters if not p.ds_persist]
        assert sharded and all(p.numel() == 0 for p in sharded)
        assert sum(p.ds_numel for p in parameters) == sum(p.numel() for p in plain.parameters())
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=given)
        assert optimizer is None
        engine.module.eval()
        assert torch.equal(engine.module.generate(prompt, **options), expected), place
        engine.destroy()
        del alive


def adapters() -> None:
    """PEFT's LoRA."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def lora() -> Any:
        model = AutoModelForCausalLM.from_config(small())
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )

    for stage in (2, 3):
        trainer = make(f"lora{stage}", config(stage), model=lora, learning_rate=1e-2)
        trainer.train()
        trainer.save_model(f"{FOLDER}/lora{stage}")
        torch.distributed.barrier()
        unset_hf_deepspeed_config()
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(small()), f"{FOLDER}/lora{stage}")
        trained = [p for name, p in loaded.named_parameters() if "lora_B" in name]
        assert trained and all(p.abs().sum() > 0 for p in trained)


def resizing() -> None:
    """resize_token_embeddings under stage 3, then training."""

    def longer() -> Any:
        model = AutoModelForCausalLM.from_config(small("gpt2"))
        model.resize_token_embeddings(136)
        return model

    trainer = make("longer", config(3, stage3_param_persistence_threshold=0), model=longer, max_steps=1)
    trainer.train()
    weight = model_of(trainer).get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.shape == (136, 32)


def main() -> None:
    Path(FOLDER).mkdir(exist_ok=True)
    for scene in sys.argv[2:]:
        globals()[scene]()
        torch.distributed.barrier()
        if RANK == 0:
            print("scene", scene, "ends well", flush=True)


if __name__ == "__main__":
    main()
