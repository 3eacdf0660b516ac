"""Names of DeepSpeed that zlaunch has nothing for: they can be imported, and are an error when used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from zlaunch.compat.deepspeed import is_installed
from zlaunch.runtime.optimizer_specs import SIGN_NAMES, listed

INFERENCE = "serve an exported model with vLLM, or generate with ZeRO stage 3 and no optimizer"
PIPELINE = "deepspeed.pipe.PipelineModule takes a list of layers; pipeline.stages of the config divides them"
EXPERTS = (
    "use the model's own experts, zlaunch.Experts or moe.layer.MoE: ZeRO shards them, parallel.expert of the "
    "config gives ranks different ones"
)
TENSOR_PARALLEL = "tensor_parallel.autotp_size of the config lets ranks share each layer"
SEQUENCES = (
    "parallel.sequence of the config divides sequences (zlaunch.sequence.attention in a model of your own), "
    "activation_checkpointing.tiled_mlp and tiled_loss compute in tiles"
)
FLOPS = "use flops_profiler of the config, or torch.utils.flop_counter.FlopCounterMode and torch.profiler"
ELASTICITY = "checkpoints load at any number of ranks: write the batch keys for the ranks there are"
OPTIMIZERS = f"the optimizers {listed(SIGN_NAMES, 'and')} exchange signs by themselves"

MODULES = {
    "autotuning": "write the batch sizes into the config; zlaunch --dry_run shows what they mean",
    "compile": "engine.compile is torch.compile",
    "compression": "use torchao, or torch's own quantization and pruning",
    "elasticity": ELASTICITY,
    "inference": INFERENCE,
    "io": "checkpoints are written by engine.save_checkpoint itself",
    "launcher": "the command is zlaunch",
    "linear": "use PEFT for LoRA and quantized layers",
    "model_implementations": INFERENCE,
    "module_inject": INFERENCE,
    "moe": EXPERTS,
    "monitor": "the trackers are tensorboard, wandb, csv_monitor and comet",
    "nebula": "checkpoints are written by engine.save_checkpoint itself",
    "nvme": "the section aio of the config has what transfers to disk are made with",
    "ops": "torch has the layers; kernels for optimizers are compiled when they are first used",
    "pipe": PIPELINE,
    "profiling": FLOPS,
    "runtime.checkpoint_engine": "checkpoints are written by engine.save_checkpoint itself",
    "runtime.comm": OPTIMIZERS,
    "runtime.data_pipeline": "choose the data in the script",
    "runtime.state_dict_factory": "load the parts with Megatron's own tools and give the model whole weights",
    "runtime.domino": TENSOR_PARALLEL,
    "runtime.hybrid_engine": INFERENCE,
    "runtime.pipe": PIPELINE,
    "runtime.sequence_parallel": SEQUENCES,
    "runtime.swap_tensor": "offload_optimizer and offload_param of the config move state to disk",
    "runtime.tensor_parallel": TENSOR_PARALLEL,
    "sequence": SEQUENCES,
    "utils.timer": "use wall_clock_breakdown of the config, engine.tput_timer, or torch.profiler",
}
"""Packages of DeepSpeed's, without its own name, and what to use for what is in them."""

_MORE = "(docs/migrating/deepspeed.md lists what is supported; --compat none uses an installed DeepSpeed)"


class NotInZlaunch(NotImplementedError):
    """A part of DeepSpeed that zlaunch does not have."""


def _fail(name: str, instead: str) -> NoReturn:
    raise NotInZlaunch(f"deepspeed.{name} is not supported: {instead}")


class _Missing(type):
    """The class of missing classes: their attributes are an error that says why."""

    _path: str
    _instead: str

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AttributeError(f"deepspeed.{cls._path}.{name} is not supported: {cls._instead}")


def missing_class(name: str, instead: str) -> type:
    """Make a class that can be imported, subclassed and used in ``isinstance``, but raises NotInZlaunch
    when an instance is made. ``instead`` says what to do.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        _fail(name, instead)

    members = {
        "__new__": refuse,
        "__doc__": f"Not in zlaunch: {instead}.",
        "_path": name,
        "_instead": instead,
    }
    return _Missing(name.rpartition(".")[2], (), members)


def missing_function(name: str, instead: str) -> Any:
    """Make a function that raises NotInZlaunch when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _fail(name, instead)

    refuse.__name__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not in zlaunch: {instead}."
    return refuse


def _told(path: str) -> str:
    """Return what is said of a module, or of a name in one, by its path after ``deepspeed.``."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if instead := MODULES.get(".".join(parts[:count])):
            return f"is not supported: {instead} {_MORE}"
    return f"is not supported {_MORE}"


def absent(module: str) -> Any:
    """Make a module's ``__getattr__``: names that it does not have are an error that says why."""

    def get(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path = f"{module}.{name}"
        raise AttributeError(f"{path} {_told(path.removeprefix('deepspeed.'))}")

    return get


class MissingModules:
    """The last finder of ``sys.meta_path``: importing a module of DeepSpeed's that is not here is a
    ModuleNotFoundError that says what to use. ``importlib.util.find_spec`` gives None for it, as ever.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None where somebody only asks, else raise ModuleNotFoundError."""
        package, _, rest = name.partition(".")
        if package != "deepspeed" or not rest or not is_installed() or not _is_imported():
            return None
        raise ModuleNotFoundError(f"No module named {name!r}: it {_told(rest)}", name=name)


def _is_imported() -> bool:
    """Tell whether an import statement, and nobody else, asks for a module."""
    asking = sys._getframe(3)
    return asking.f_code.co_name == "_find_and_load_unlocked"


def name_missing_modules() -> None:
    """Let imports of DeepSpeed's modules that are not here say what to use, from now on."""
    if MissingModules not in sys.meta_path:
        sys.meta_path.append(MissingModules)
