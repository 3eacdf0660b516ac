"""``DeepSpeedConfig``: a checked config as an object."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zlaunch.compat.deepspeed.getters import _PATHS, read
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.runtime.config import load, resolve
from zlaunch.runtime.environment import read_environment

_unknown = absent("DeepSpeedConfig")
_OWN = {
    "zero_config": "zero_optimization",
    "fp16_config": "fp16",
    "bf16_config": "bf16",
    "aio_config": "aio",
    "activation_checkpointing_config": "activation_checkpointing",
    "checkpoint_config": "checkpoint",
    "zero_optimization_stage": "zero_optimization.stage",
}


class DeepSpeedConfig:
    """``DeepSpeedConfig(path_or_dict)``: keys as attributes, the batch keys settled for all ranks. Raises
    DeepSpeedConfigError.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world = dist.get_world_size() if dist.is_initialized() else read_environment().world_size
        loaded = load(config)
        self._param_dict = loaded.raw
        self._effective = resolve(loaded, world_size=world)
        self.world_size = world

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        config = self._effective.config
        path = _OWN.get(name) or _PATHS.get(name)
        if path is not None:
            return read(config, path)
        if name == "zero_enabled":
            return config.zero_optimization.stage > 0
        return getattr(config, name) if hasattr(config, name) else _unknown(name)

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Every key, its value and where it comes from."""
        for path, value, source in self._effective.table():
            print(f"{name}.{path} = {value}  ({source})")
