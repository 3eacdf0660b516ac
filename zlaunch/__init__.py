"""zlaunch: launch a training script anywhere and make its model fit.

The names below are loaded on first use, so that ``import zlaunch`` (and the command, which never needs torch)
stays light.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"

_LAZY = {
    "initialize": ("zlaunch.runtime.api", "initialize"),
    "prepare": ("zlaunch.runtime.prepare", "prepare"),
    "seed": ("zlaunch.runtime.prepare", "seed"),
    "init_distributed": ("zlaunch.runtime.comm.process_group", "init_distributed"),
    "add_config_arguments": ("zlaunch.runtime.api", "add_config_arguments"),
    "Engine": ("zlaunch.runtime.engine", "Engine"),
    "checkpointing": ("zlaunch.checkpointing", ""),
    **{
        name: ("zlaunch.runtime.checkpoint.export.full_weights", name)
        for name in (
            "convert_zero_checkpoint_to_fp32_state_dict",
            "get_fp32_state_dict_from_zero_checkpoint",
            "load_state_dict_from_zero_checkpoint",
        )
    },
    **{
        name: ("zlaunch.compat.fp32_access", name)
        for name in (
            "safe_get_full_fp32_param",
            "safe_get_full_grad",
            "safe_get_full_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
        )
    },
    **{
        name: ("zlaunch.runtime.errors", name)
        for name in (
            "DiskError",
            "LossScaleFloorError",
            "MemoryPlanError",
            "OffloadedError",
            "OptimizerError",
            "ParameterError",
            "PeerLost",
            "RankMismatchError",
            "UnsupportedError",
        )
    },
    **{name: ("zlaunch.errors", name) for name in ("LaunchError", "NodeError", "ZlaunchError")},
    "Experts": ("zlaunch.runtime.parallel.expert", "Experts"),
    "CheckpointError": ("zlaunch.runtime.checkpoint.format.tensor_file", "CheckpointError"),
    "ConfigError": ("zlaunch.runtime.config", "ConfigError"),
    "resume_dir": ("zlaunch.runtime.checkpoint.resume", "resume_dir"),
    "data": ("zlaunch.data", ""),
    "optim": ("zlaunch.optim", ""),
    "launch": ("zlaunch.jobs", "launch"),
    "FunctionJob": ("zlaunch.jobs", "FunctionJob"),
    "JobFailedError": ("zlaunch.jobs", "JobFailedError"),
    "notebook": ("zlaunch.notebook", "notebook"),
    "report": ("zlaunch.runtime.report", "report"),
    "sequence": ("zlaunch.sequence", ""),
    "tensor_parallel": ("zlaunch.runtime.parallel.plans", "tensor_parallel"),
    "zero": ("zlaunch.zero", ""),
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiskError",
    "Engine",
    "Experts",
    "FunctionJob",
    "JobFailedError",
    "LaunchError",
    "LossScaleFloorError",
    "MemoryPlanError",
    "NodeError",
    "OffloadedError",
    "OptimizerError",
    "ParameterError",
    "PeerLost",
    "RankMismatchError",
    "UnsupportedError",
    "ZlaunchError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "data",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "initialize",
    "launch",
    "load_state_dict_from_zero_checkpoint",
    "notebook",
    "optim",
    "prepare",
    "report",
    "resume_dir",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "seed",
    "sequence",
    "tensor_parallel",
    "zero",
]

if TYPE_CHECKING:
    from zlaunch import checkpointing as checkpointing
    from zlaunch import data as data
    from zlaunch import optim as optim
    from zlaunch import sequence as sequence
    from zlaunch import zero as zero
    from zlaunch.compat.fp32_access import safe_get_full_fp32_param as safe_get_full_fp32_param
    from zlaunch.compat.fp32_access import safe_get_full_grad as safe_get_full_grad
    from zlaunch.compat.fp32_access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from zlaunch.compat.fp32_access import safe_set_full_fp32_param as safe_set_full_fp32_param
    from zlaunch.compat.fp32_access import safe_set_full_grad as safe_set_full_grad
    from zlaunch.compat.fp32_access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from zlaunch.errors import LaunchError as LaunchError
    from zlaunch.errors import NodeError as NodeError
    from zlaunch.errors import ZlaunchError as ZlaunchError
    from zlaunch.jobs import FunctionJob as FunctionJob
    from zlaunch.jobs import JobFailedError as JobFailedError
    from zlaunch.jobs import launch as launch
    from zlaunch.notebook import notebook as notebook
    from zlaunch.runtime.api import add_config_arguments as add_config_arguments
    from zlaunch.runtime.api import initialize as initialize
    from zlaunch.runtime.checkpoint.export.full_weights import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
    from zlaunch.runtime.checkpoint.export.full_weights import (
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
    )
    from zlaunch.runtime.checkpoint.export.full_weights import (
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError as CheckpointError
    from zlaunch.runtime.checkpoint.resume import resume_dir as resume_dir
    from zlaunch.runtime.comm.process_group import init_distributed as init_distributed
    from zlaunch.runtime.config import ConfigError as ConfigError
    from zlaunch.runtime.engine import Engine as Engine
    from zlaunch.runtime.errors import DiskError as DiskError
    from zlaunch.runtime.errors import LossScaleFloorError as LossScaleFloorError
    from zlaunch.runtime.errors import MemoryPlanError as MemoryPlanError
    from zlaunch.runtime.errors import OffloadedError as OffloadedError
    from zlaunch.runtime.errors import OptimizerError as OptimizerError
    from zlaunch.runtime.errors import ParameterError as ParameterError
    from zlaunch.runtime.errors import PeerLost as PeerLost
    from zlaunch.runtime.errors import RankMismatchError as RankMismatchError
    from zlaunch.runtime.errors import UnsupportedError as UnsupportedError
    from zlaunch.runtime.parallel.expert import Experts
    from zlaunch.runtime.parallel.plans import tensor_parallel
    from zlaunch.runtime.prepare import prepare as prepare
    from zlaunch.runtime.prepare import seed as seed
    from zlaunch.runtime.report import report as report


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'zlaunch' has no attribute {name!r}") from None
    from importlib import import_module

    value = getattr(import_module(module), attribute) if attribute else import_module(module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
