"""Defines ``zlaunch.prepare``, the short way to an engine for a plain PyTorch loop, and ``zlaunch.seed``."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import torch
from torch import nn

from .api import initialize
from .config import ConfigError
from .engine import Engine
from .environment import read_environment

_ON_HOST = {"device": "cpu"}
PRESETS: dict[str, dict[str, Any]] = {
    "ddp": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3-offload": {"stage": 3, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST},
}
"""The section ``zero_optimization`` of each preset."""
_KEYS = {
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
    "compile": "compile.enabled",
    "max_grad_norm": "gradient_clipping",
    "loss_reduction": "loss_reduction",
    "batch_size": "train_micro_batch_size_per_gpu",
}
"""The config's key for each argument that completes a preset."""


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] = "ddp",
    lr_scheduler: Any = None,
    bf16: bool | None = None,
    fp16: bool | None = None,
    compile: bool | None = None,
    max_grad_norm: float | None = None,
    loss_reduction: str | None = None,
    batch_size: int | None = None,
) -> Engine:
    """Shard a model for a plain PyTorch loop and return the engine to call instead of the model.

    The loop keeps ``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()``. Every
    ``optimizer.step()`` updates the weights: to accumulate gradients, divide the loss and call it after
    several backward passes. Collective: every rank calls it with the same model, and starts from rank 0's
    values.

    Args:
        model: The model, on any device.
        optimizer: The optimizer of the model's parameters, or a callable that makes one of them. It stays the
            same object; its methods call the engine.
        config: ``"ddp"`` (every rank has the whole model), ``"zero1"`` (optimizer states are sharded),
            ``"zero2"`` (gradients, too), ``"zero3"`` (parameters, too) or ``"zero3-offload"`` (parameters and
            optimizer states are in host memory); or a config as :func:`zlaunch.initialize` takes it, with the
            defaults of DeepSpeed.
        lr_scheduler: A scheduler, or a callable that makes one of the optimizer. The engine steps it after
            each update and saves it with checkpoints. None where the loop does so.

    The other arguments complete a preset; a config has keys for them:

        bf16: Compute in bfloat16, with fp32 master weights. Floating-point inputs are cast.
        fp16: Compute in float16, with dynamic loss scaling. The loss has to come from the model's outputs.
        compile: Compile the members of the model's ModuleLists with torch.compile.
        max_grad_norm: Clip the L2 norm of the gradients in each update; None does not clip.
        loss_reduction: ``"tokens"`` weights losses by ``engine.backward(loss, num_tokens=...)``.
        batch_size: Samples of a micro-batch on one rank; default: that of the first DataLoader that
            ``engine.dataloader`` gets. Counts of samples use it (1 until it is known), and so do loaders of
            data sets, which otherwise need a ``batch_size`` of their own.

    Returns:
        The engine, an ``nn.Module``. ``engine.dataloader(...)`` shares out the samples,
        ``engine.save_checkpoint`` and ``engine.load_checkpoint`` save and resume.

    Raises:
        ConfigError: ``config`` is neither a preset nor a config, or an argument that completes presets is
            given with a config, which has a key for it.
        TypeError, ValueError: as :func:`zlaunch.initialize`.
    """
    given = {
        name: value
        for name, value in {
            "bf16": bf16,
            "fp16": fp16,
            "compile": compile,
            "max_grad_norm": max_grad_norm,
            "loss_reduction": loss_reduction,
            "batch_size": batch_size,
        }.items()
        if value is not None
    }
    preset = PRESETS.get(config) if isinstance(config, str) else None
    settings: Any = config
    if preset is not None:
        settings = _complete(preset, given)
    elif given:
        arguments = ", ".join(f"{name}=" for name in given)
        keys = ", ".join(_KEYS[name] for name in given)
        raise ConfigError([f"prepare: {arguments} completes a preset. In a config, set {keys} instead"])
    elif _is_misspelled_preset(config):
        similar = get_close_matches(str(config).lower(), PRESETS, n=1)
        advice = f". Did you mean {similar[0]!r}?" if similar else ""
        raise ConfigError(
            [f"prepare: config {config!r} is neither a preset ({', '.join(PRESETS)}) nor a file{advice}"]
        )
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, config=settings)
    if preset is not None and batch_size is None:
        engine.take_batch_size_of_loader()
    return engine


def _is_misspelled_preset(config: object) -> bool:
    """Return whether a config is a single word, as presets are, and no file."""
    is_word = isinstance(config, str) and re.fullmatch(r"[\w-]{0,40}", config) is not None
    return config is None or (is_word and not os.path.lexists(str(config)))


def _complete(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's config. As in plain torch, each step is an update, and nothing is clipped."""
    settings: dict[str, Any] = {
        "zero_optimization": dict(preset),
        "train_micro_batch_size_per_gpu": given.get("batch_size", 1),
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": given.get("max_grad_norm", 0.0),
    }
    for name in ("bf16", "fp16"):
        if name in given:
            settings[name] = {"enabled": given[name], "auto_cast": given[name]}
    if "compile" in given:
        settings["compile"] = {"enabled": given["compile"]}
    if "loss_reduction" in given:
        settings["loss_reduction"] = given["loss_reduction"]
    return settings


def seed(value: int, *, per_rank: bool = False) -> None:
    """Seed the random generators of Python, NumPy and torch, on all devices.

    Args:
        value: The seed, from 0 to 2**32 - 1, as NumPy takes it.
        per_rank: Add this process's rank, so that ranks draw different numbers, such as dropout masks and
            augmentations. Without it, all ranks draw the same, as a random split of a data set needs.

    Raises TypeError or ValueError for another seed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, Integral)):
        raise TypeError(f"seed is {value!r}, expected a whole number")
    if not 0 <= value < 2**32:
        raise ValueError(f"seed is {value}, expected a number from 0 to 2**32 - 1")
    chosen = (int(value) + read_environment().rank) % 2**32 if per_rank else int(value)
    random.seed(chosen)
    torch.manual_seed(chosen)  # also those of all GPUs
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(chosen)
