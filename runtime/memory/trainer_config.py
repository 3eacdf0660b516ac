"""Makes the config of a Hugging Face Trainer from one of a training loop: numbers become arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..config.load import parse
from ..optimizer_specs import ESTIMATED, MOMENTS


def trainer_config(text: str, world_size: int) -> tuple[str, dict[str, int | bool]]:
    """Return plain JSON for ``TrainingArguments(deepspeed=...)``, and the arguments with the config's values.

    accelerate reads no comments, and rejects a number that differs from its argument in TrainingArguments.
    Such keys are "auto", which it fills in from there. Of the parallel axes, the Trainer takes tensor and
    expert parallelism from the config.

    Args:
        text: A config as ``config_text`` writes it, with comments.
        world_size: Number of ranks; only counts where ``text`` has ``train_batch_size``.
    """
    config: dict[str, Any] = dict(parse(text)[0])
    micro_batch = config.pop("train_micro_batch_size_per_gpu")
    batch = config.pop("train_batch_size", None)
    accumulated = config.pop("gradient_accumulation_steps", 1)
    if batch is not None:
        accumulated = batch // (micro_batch * world_size)
    arguments: dict[str, int | bool] = {"per_device_train_batch_size": micro_batch}
    if accumulated > 1:
        arguments["gradient_accumulation_steps"] = accumulated
    written: dict[str, Any] = {"$schema": config.pop("$schema")} if "$schema" in config else {}
    written |= dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    if "torch_autocast" not in config:  # it excludes both, and accelerate fills in no "auto" there
        for name in ("bf16", "fp16"):
            if name in config:
                arguments[name] = True
            written[name] = {**config.pop(name, {}), "enabled": "auto"}
    optimizer = config.pop("optimizer")
    spec = ESTIMATED[optimizer["type"]]
    # TrainingArguments have Adam's betas and eps, which other optimizers must not get: Lion's are others.
    filled = ("lr", *(("betas", "eps") if spec.states == MOMENTS else ()), "weight_decay")
    names = [name for name in filled if name in spec.defaults]
    written["optimizer"] = {**optimizer, "params": {**optimizer["params"], **dict.fromkeys(names, "auto")}}
    parallel = dict(config.pop("parallel", {}))
    tensor = parallel.pop("tensor", 1)
    if parallel:
        written["parallel"] = parallel
    if tensor > 1:
        # Without this key, accelerate's data loaders give different samples to the ranks of one model.
        written["tensor_parallel"] = {"autotp_size": tensor}
    written |= config
    # Without this the Trainer writes no weights that from_pretrained loads, at stage 3 and with parallel
    # axes. The stage may be changed by hand, so the key is always there.
    written["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return _plain_json(written), arguments


def as_command_line(arguments: Mapping[str, int | bool]) -> str:
    """Return the arguments as a script with HfArgumentParser takes them."""
    # with its value, for trl's --bf16 is no flag
    return " ".join(f"--{name} {json.dumps(value)}" for name, value in arguments.items())


def as_keywords(arguments: Mapping[str, int | bool | str]) -> str:
    """Return the arguments as a call of TrainingArguments takes them."""
    return ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in arguments.items()
    )


def _plain_json(config: Mapping[str, Any]) -> str:
    """Write one key a line, as ``config_text`` does."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items())
    return f"{{\n{lines}\n}}"
