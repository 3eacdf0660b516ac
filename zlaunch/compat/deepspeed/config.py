"""``DeepSpeedConfig`` and the sections that scripts build by themselves: checked configs as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch.distributed as dist

from zlaunch.compat.deepspeed.getters import _PATHS, read
from zlaunch.compat.deepspeed.log import logger
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.monitors import get_monitor_config
from zlaunch.compat.deepspeed.pickled import OffloadDeviceEnum, ZeroStageEnum
from zlaunch.runtime.config import load, resolve
from zlaunch.runtime.config.field_types import Section
from zlaunch.runtime.config.known_keys import names
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.restarts import read_restarts

_unknown = absent("DeepSpeedConfig")
_OWN = {
    "fp16_config": "fp16",
    "bf16_config": "bf16",
    "aio_config": "aio",
    "activation_checkpointing_config": "activation_checkpointing",
    "checkpoint_config": "checkpoint",
    "zero_optimization_stage": "zero_optimization.stage",
}


class _SectionView:
    """A section of the config: ``Kind(**keys)`` checks the keys, attributes are their values and defaults.

    "auto" is the default, as for DeepSpeed. Raises DeepSpeedConfigError for what no config could say.
    """

    _around: ClassVar[tuple[str, ...]]
    """Names of the sections around it, and its own."""

    def __init__(self, **keys: Any) -> None:
        given: dict[str, Any] = {
            key: value.model_dump() if isinstance(value, _SectionView) else value
            for key, value in keys.items()
        }
        for name in reversed(self._around):
            given = {name: given}
        if len(self._around) > 1:  # which of the stages does not matter to what is inside
            given[self._around[0]]["stage"] = 3
        loaded = load(given)
        for warning in loaded.warnings:
            logger.warning("%s", warning)
        self._section = read(loaded.config, ".".join(self._around))

    @classmethod
    def of(cls, section: Any) -> Any:
        """View a section that has been checked; None for none."""
        if section is None:
            return None
        view = cls.__new__(cls)
        view._section = section
        return view

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        own = names(cast(type[Section], type(self._section))).get(name)
        if own is None:
            return absent(type(self).__name__)(name)
        return _seen(own, getattr(self._section, own))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SectionView) and self._section == other._section

    __hash__ = None  # type: ignore[assignment]  # as any object with an __eq__ of its own

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._section!r})"

    def model_dump(self) -> dict[str, Any]:
        """Return every key and its value, as plain values."""
        return dict(self._section.model_dump())


class DeepSpeedZeroOffloadParamConfig(_SectionView):
    """``zero_optimization.offload_param``."""

    _around = ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(_SectionView):
    """``zero_optimization.offload_optimizer``."""

    _around = ("zero_optimization", "offload_optimizer")


class DeepSpeedZeroConfig(_SectionView):
    """``zero_optimization``."""

    _around = ("zero_optimization",)


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """View ``zero_optimization`` of a whole config."""
    return DeepSpeedZeroConfig(**(param_dict.get("zero_optimization") or {}))


_KINDS: dict[str, Any] = {
    "stage": ZeroStageEnum,
    "device": OffloadDeviceEnum,
    "offload_param": DeepSpeedZeroOffloadParamConfig.of,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig.of,
}
"""Key -> what makes DeepSpeed's kind of value of it."""


def _seen(key: str, value: Any) -> Any:
    make = _KINDS.get(key)
    return value if make is None else make(value)


class DeepSpeedConfig:
    """``DeepSpeedConfig(path_or_dict)``: keys as attributes, the batch keys settled for all ranks. Raises
    DeepSpeedConfigError.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world = dist.get_world_size() if dist.is_initialized() else read_environment().world_size
        loaded = load(config)
        self._param_dict = loaded.raw
        self._effective = resolve(loaded, world_size=world, **read_restarts())
        self.world_size = world

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        config = self._effective.config
        if name == "zero_config":
            return DeepSpeedZeroConfig.of(config.zero_optimization)
        if name == "monitor_config":
            return get_monitor_config(self._param_dict)
        path = _OWN.get(name) or _PATHS.get(name)
        if path is not None:
            return read(config, path)
        if name == "zero_enabled":
            return config.zero_optimization.stage > 0
        return getattr(config, name) if hasattr(config, name) else _unknown(name)

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Print every key, its value and where it comes from."""
        for path, value, source in self._effective.table():
            print(f"{name}.{path} = {value}  ({source})")
