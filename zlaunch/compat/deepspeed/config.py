"""``DeepSpeedConfig`` and the sections that scripts build by themselves: checked configs as objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import reduce
from typing import Any, ClassVar, cast

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from zlaunch.compat.deepspeed.engine import _PATHS, read
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.tools import logger
from zlaunch.runtime.config import Config, load, resolve
from zlaunch.runtime.config.check import names
from zlaunch.runtime.config.fields import Section
from zlaunch.runtime.config.schema import TRACKERS, Comet, FileMonitor, WandB
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.observe import trackers
from zlaunch.runtime.restarts import read_restarts

# -- names ------------------------------------------------------------------------------------------


ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = Config().gradient_clipping


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """Return the norm to which a config, read as a dict, clips gradients; 0 means that it does not."""
    return param_dict.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)


# -- pickled ----------------------------------------------------------------------------------------
#
# Small classes that DeepSpeed has under these names, also inside its checkpoint files.


class ZeroStageEnum(IntEnum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where things rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Parts of an engine's state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass
class fragment_address:
    """A piece of a flat tensor."""

    numel: int
    start: int


class LossScalerBase:
    """A loss scale; the engine has its own, this is for files."""

    def __init__(self, cur_scale: float = 1.0) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """Return what losses are multiplied with."""
        return self.cur_scale


class LossScaler(LossScalerBase):
    """A fixed one."""


class DynamicLossScaler(LossScalerBase):
    """One that adapts."""

    def __init__(self, init_scale: float = 2.0**32, **settings: Any) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.__dict__.update(settings)


# -- monitors ---------------------------------------------------------------------------------------
#
# ``deepspeed.monitor``: trackers without an engine.


class DeepSpeedMonitorConfig:
    """Holds the sections of the trackers; DeepSpeed's name for it.

    Attributes
        tensorboard, wandb, csv_monitor, comet: the sections, with their defaults.
        enabled: one of them is switched on.
        whole: a Config with these sections.
    """

    tensorboard: FileMonitor
    wandb: WandB
    csv_monitor: FileMonitor
    comet: Comet

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        """Read sections by name. Raises ConfigError."""
        config = load({name: dict(section) for name, section in sections.items()}).config
        for name in TRACKERS:
            setattr(self, name, getattr(config, name))
        self.whole = config
        self.enabled = any(getattr(config, name).enabled for name in TRACKERS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the sections of the trackers in a config dict; other keys are not looked at."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in TRACKERS if name in param_dict})


class Monitor(ABC):
    """Is DeepSpeed's base class for what writes events."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Write ``(name, value, step)``."""


class MonitorMaster(Monitor):
    """Writes events to every tracker of a config, on rank 0."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        """Open the trackers. Raises MonitorError."""
        super().__init__(monitor_config)
        rank = dist.get_rank() if dist.is_initialized() else read_environment().rank
        self._monitor = trackers.Monitor(monitor_config.whole, rank)
        self.enabled = self._monitor.enabled

    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Write ``(name, value, step)``. Raises MonitorError where an event is something else."""
        self._monitor.write_events(event_list)


# -- config -----------------------------------------------------------------------------------------


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

    @property
    def pipeline(self) -> bool:
        """Return whether state is read or written while others are stepped."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_SectionView):
    """``zero_optimization.leaf_module``."""

    _around = ("zero_optimization", "leaf_module")


class DeepSpeedZeroConfig(_SectionView):
    """``zero_optimization``."""

    _around = ("zero_optimization",)

    @property
    def overlap_comm(self) -> bool:
        """Return what the config says, and by default whether this is stage 3, as DeepSpeed does."""
        said = self._section.overlap_comm
        return bool(self._section.stage == 3 if said is None else said)


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """View ``zero_optimization`` of a whole config."""
    return DeepSpeedZeroConfig(**(param_dict.get("zero_optimization") or {}))


class DeepSpeedFP16Config(_SectionView):
    """``fp16``."""

    _around = ("fp16",)

    def initial_dynamic_scale(self) -> int:
        """Return the first loss scale, if it is a dynamic one."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the settings of a dynamic loss scale under DeepSpeed's names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(_SectionView):
    """``bf16``."""

    _around = ("bf16",)


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """View ``fp16`` of a whole config."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """View ``bf16`` of a whole config, or ``bfloat16``, its older name."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


_KINDS: dict[str, Any] = {
    "stage": ZeroStageEnum,
    "device": OffloadDeviceEnum,
    "offload_param": DeepSpeedZeroOffloadParamConfig.of,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig.of,
    "leaf_module": DeepSpeedZeroLeafModuleConfig.of,
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


# -- sections of other packages ---------------------------------------------------------------------


class DeepSpeedConfigModel(BaseModel):
    """Is the base class of sections that packages beside DeepSpeed define.

    Unknown keys are an error, and "auto" is the default unless ``strict``. A field whose
    ``json_schema_extra`` has ``deprecated`` warns when it is given. Its ``new_param``, dotted in sections
    below, is set to ``new_param_fn(value)`` unless ``set_new_param`` is false.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        """Check the keys. Raises pydantic's ValidationError, and AssertionError where a deprecated key comes
        with the one that replaces it.
        """
        given = data if strict else {key: value for key, value in data.items() if value != "auto"}
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if name in self.model_fields_set and isinstance(extra, dict) and extra.get("deprecated"):
                self._replace_deprecated(name, extra)

    def _replace_deprecated(self, name: str, extra: dict[str, Any]) -> None:
        new = extra.get("new_param", "")
        instead = f": use {new} instead" if new else ""
        logger.warning(
            "Config parameter %s is deprecated%s. %s", name, instead, extra.get("deprecated_msg", "")
        )
        if not new or not extra.get("set_new_param", True):
            return
        value = getattr(self, name)
        convert = extra.get("new_param_fn")
        delattr(self, name)
        parts = new.split(".")
        last = parts[-1]
        section = reduce(getattr, parts[:-1], self)
        assert last not in section.model_fields_set, f"give {name} or {new}, not both"
        setattr(section, last, value if convert is None else convert(value))


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a key of a config dict, or the default."""
    return param_dict.get(param_name, param_default_value)
