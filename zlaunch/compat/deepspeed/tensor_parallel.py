"""``deepspeed.tp_model_init``: notes the size of the tensor axis that the config must have, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zlaunch.compat.deepspeed.missing import TENSOR_PARALLEL, NotInZlaunch
from zlaunch.runtime.config import ConfigError, load, tensor_size
from zlaunch.runtime.engine import Engine
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.log import say

_NOTE = "zlaunch_tp_size"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Note how many ranks will share the model's layers, and return it unchanged.

    ``initialize`` shares them by its config, in whose precision they compute.

    Raises NotInZlaunch for a process group of the script's own and other arguments, and ConfigError where
    ``config`` says another size.
    """
    given = sorted(name for name, value in kwargs.items() if value is not None)
    if given:
        raise NotInZlaunch(f"deepspeed.tp_model_init({given[0]}=...) is not in zlaunch: {TENSOR_PARALLEL}")
    if config is not None:
        _compare(tp_size, tensor_size(load(config).config))
    setattr(model, _NOTE, int(tp_size))
    return model


def count_samples_once(config: Any) -> Any:
    """Return a config whose train_batch_size counts the samples of ranks that share layers once, not for each
    of them as accelerate does for DeepSpeed. Any other config is returned as it is.
    """
    if not isinstance(config, Mapping):
        return config
    size = tensor_size(load(config).config)
    sizes = [config.get(name) for name in _SIZES]
    if size <= 1 or not all(type(each) is int for each in sizes):
        return config
    train, micro, accumulation = (int(each) for each in sizes if each is not None)
    if train != micro * accumulation * read_environment().world_size:
        return config
    if read_environment().rank == 0:
        say(
            f"train_batch_size: {train} counts the samples of {size} ranks that share each layer {size} times"
        )
    return {**config, "train_batch_size": train // size}


def check_noted_size(model: nn.Module, engine: Engine) -> None:
    """Raise ConfigError if a model was given to ``tp_model_init`` with another size than its engine has, or
    accelerate's ParallelismConfig has one.
    """
    configured = engine.world_size // engine.data_parallel_size
    noted = getattr(model, _NOTE, None)
    if noted is not None:
        _compare(noted, configured)
    states: Any = sys.modules.get("accelerate.state")
    state = getattr(getattr(states, "AcceleratorState", None), "_shared_state", {})
    asked = state.get("parallelism_config")
    for name, size in (("tp_size", configured), ("cp_size", 1), ("sp_size", 1)):
        given = getattr(asked, name, None) or 1
        if given > 1 and given != size:
            advice = "not supported; set it to 1"
            if name == "tp_size":
                advice = f"the config says {size}: set tensor_parallel.autotp_size to {given}"
            raise ConfigError([f"ParallelismConfig({name}={given}): {advice}"])


def _compare(noted: int, configured: int) -> None:
    if noted != configured:
        raise ConfigError(
            [
                f"tp_model_init was called with tp_size {noted}, but tensor_parallel.autotp_size of the "
                f"config is {configured}: set it to {noted}"
            ]
        )
