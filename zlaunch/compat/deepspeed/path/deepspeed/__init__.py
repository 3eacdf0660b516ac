"""zlaunch under the name of DeepSpeed: the same functions and classes over another runtime."""

import os as _os
import sys as _sys

import zlaunch as _zlaunch
from zlaunch.compat.deepspeed import VERSION as __version__
from zlaunch.compat.deepspeed import lightning as _lightning
from zlaunch.compat.deepspeed.engine import (
    DeepSpeedEngine,
    PipelineEngine,
    add_config_arguments,
    initialize,
)
from zlaunch.compat.deepspeed.missing import INFERENCE as _INFERENCE
from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.missing import missing_class as _missing_class
from zlaunch.compat.deepspeed.missing import missing_function as _missing_function
from zlaunch.compat.deepspeed.missing import name_missing_modules as _name_missing_modules
from zlaunch.compat.deepspeed.optimizers import DeepSpeedOptimizer
from zlaunch.compat.deepspeed.parallel import tp_model_init
from zlaunch.compat.deepspeed.tools import log_dist, logger
from zlaunch.runtime.data import EngineLoader as DeepSpeedDataLoader
from zlaunch.runtime.log import detail as _detail

from . import (
    accelerator,
    checkpoint,
    comm,
    elasticity,
    launcher,
    moe,
    monitor,
    ops,
    pipe,
    profiling,
    runtime,
    utils,
)
from .accelerator import get_accelerator
from .comm import init_distributed
from .git_version_info import git_branch as __git_branch__
from .git_version_info import git_hash as __git_hash__
from .pipe import PipelineModule
from .runtime import zero
from .runtime.activation_checkpointing import checkpointing
from .runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from .utils.init_on_device import OnDevice

_lightning.watch()

__version_major__, __version_minor__, __version_patch__ = (int(_n) for _n in __version__.split("."))
version = __version__
git_hash = __git_hash__
git_branch = __git_branch__
dist = comm

InferenceEngine = _missing_class("InferenceEngine", _INFERENCE)
DeepSpeedInferenceConfig = _missing_class("DeepSpeedInferenceConfig", _INFERENCE)
DeepSpeedHybridEngine = _missing_class("DeepSpeedHybridEngine", _INFERENCE)
DeepSpeedTransformerLayer = _missing_class("DeepSpeedTransformerLayer", "use torch's own layers")
DeepSpeedTransformerConfig = _missing_class("DeepSpeedTransformerConfig", "use torch's own layers")
init_inference = _missing_function("init_inference", _INFERENCE)
default_inference_config = _missing_function("default_inference_config", _INFERENCE)
add_tuning_arguments = _missing_function("add_tuning_arguments", "name the schedule in the config")

__getattr__ = _absent("deepspeed")
_name_missing_modules()

if int(_os.environ.get("RANK") or 0) == 0:
    _detail(
        f"`import deepspeed` is zlaunch {_zlaunch.__version__}; --compat none imports the real one",
        _sys.stderr,
    )
