"""Sizes of axes that scripts say outside of the config: ``tp_model_init``, ``MoE``, ``PipelineModule``,
accelerate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zlaunch.compat.deepspeed import sequence_groups
from zlaunch.compat.deepspeed.missing import TENSOR_PARALLEL, NotInZlaunch
from zlaunch.compat.deepspeed.moe import MoE
from zlaunch.compat.deepspeed.pipe import PipelineModule
from zlaunch.runtime.comm.axis import Axis
from zlaunch.runtime.comm.process_group import open_comms
from zlaunch.runtime.config import ConfigError, expert_size, load, pipeline_size, sequence_size, tensor_size
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.log import say
from zlaunch.runtime.mesh import MeshShape

# -- axes -------------------------------------------------------------------------------------------


_NOTE = "zlaunch_tp_size"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Note how many ranks will share the model's layers, and return it unchanged.

    ``initialize`` shares them, in the precision of its config.

    Raises NotInZlaunch for a process group of the script's own and other arguments, and ConfigError where
    ``config`` says another size.
    """
    given = sorted(name for name, value in kwargs.items() if value is not None)
    if given:
        raise NotInZlaunch(f"deepspeed.tp_model_init({given[0]}=...) is not supported: {TENSOR_PARALLEL}")
    if config is not None:
        _settle({f"tp_model_init(tp_size={tp_size})": tp_size}, tensor_size(load(config).config), "tensor")
    setattr(model, _NOTE, int(tp_size))
    return model


def take_over_sizes(model: nn.Module | None, config: Any, mpu: Any = None) -> Any:
    """Return a config with the sizes of axes that were said elsewhere: to ``tp_model_init``, to the model's
    ``MoE`` layers, to the ``PipelineModule``, to ``register_with_transformers`` (which made the ``mpu``), and
    to accelerate's ParallelismConfig. A config that has them is returned as it is.

    Raises ConfigError where two of them differ, and for sizes of axes that are not supported.
    """
    tensor = _said_tensor_sizes(model)
    expert = _said_expert_sizes(model)
    sequence = _asked("sp_size")
    if mpu is sequence_groups:
        size = sequence_groups.get_sequence_parallel_world_size()
        sequence[f"register_with_transformers(sequence_parallel_size={size})"] = size
        if tensor or tensor_size(load(config).config) > 1:
            raise ConfigError(["register_with_transformers: not supported with tensor parallelism"])
    _check_accelerate(config, tensor, sequence)
    staged = model if isinstance(model, PipelineModule) else None
    stages = _said_stages(staged)
    if not (tensor or expert or sequence or staged is not None) or config is None:
        return config
    loaded = load(config)
    sizes = {
        "tensor": (tensor, tensor_size(loaded.config)),
        "expert": (expert, expert_size(loaded.config)),
        "sequence": (sequence, sequence_size(loaded.config)),
        "pipeline": (stages, pipeline_size(loaded.config)),
    }
    taken = {}
    for axis, (said, configured) in sizes.items():
        size = _settle(said, configured, axis)
        if size != configured:
            taken[axis] = size
            if read_environment().rank == 0:
                say(f"parallel.{axis}: {size}, as {next(iter(said))} says")
    found = config
    if taken:
        found = {**loaded.raw, "parallel": {**(loaded.raw.get("parallel") or {}), **taken}}
    section = loaded.raw.get("pipeline") or {}
    if staged is not None and "partition" not in section:
        raw = loaded.raw if found is config else found
        found = {**raw, "pipeline": {**section, "partition": staged.partition_method}}
    return found


def _said_stages(model: PipelineModule | None) -> dict[str, int]:
    """Return the number of stages that a PipelineModule was given, if any."""
    if model is None or model.num_stages is None:
        return {}
    return {f"PipelineModule(num_stages={model.num_stages})": model.num_stages}


def _check_accelerate(config: Any, tensor: dict[str, int], sequence: dict[str, int]) -> None:
    """Raise ConfigError for sizes in a config of accelerate's that accelerate would not see: its loaders give
    each rank samples of its own then.
    """
    if config is None or not _accelerate_state().get("deepspeed_plugins"):
        return
    loaded = load(config)
    section = loaded.config.tensor_parallel
    if tensor_size(loaded.config) > max((section.autotp_size, *tensor.values(), 1)):
        raise ConfigError(
            ["parallel.tensor: accelerate and the Trainer read tensor_parallel.autotp_size: use that key"]
        )
    if sequence_size(loaded.config) > max((*sequence.values(), 1)):
        raise ConfigError(
            ["parallel.sequence: accelerate and the Trainer take ParallelismConfig(sp_size=...)"]
        )
    if pipeline_size(loaded.config) > 1:
        raise ConfigError(["parallel.pipeline: accelerate and the Trainer have no pipelines: set it to 1"])


def _accelerate_state() -> dict[str, Any]:
    """Return the state of accelerate, empty without one."""
    states: Any = sys.modules.get("accelerate.state")
    found: dict[str, Any] = getattr(getattr(states, "AcceleratorState", None), "_shared_state", {})
    return found


def _said_tensor_sizes(model: nn.Module | None) -> dict[str, int]:
    """Return what was said about ranks that share layers, by where. Raises ConfigError for other axes."""
    found = {}
    noted = getattr(model, _NOTE, None)
    if noted is not None:
        found[f"tp_model_init(tp_size={noted})"] = int(noted)
    for where in _asked("cp_size"):
        raise ConfigError([f"{where}: not supported; sp_size divides sequences"])
    return found | _asked("tp_size")


def _asked(name: str) -> dict[str, int]:
    """Return a size above 1 that accelerate's ParallelismConfig has, by where."""
    size = getattr(_accelerate_state().get("parallelism_config"), name, None) or 1
    return {f"ParallelismConfig({name}={size})": size} if size > 1 else {}


def _said_expert_sizes(model: nn.Module | None) -> dict[str, int]:
    """Return the sizes of the model's MoE layers above 1, by where."""
    layers = [] if model is None else [(n, m) for n, m in model.named_modules() if isinstance(m, MoE)]
    return {
        f"{name or 'MoE'} (ep_size={each.ep_size})": each.ep_size for name, each in layers if each.ep_size > 1
    }


def _settle(said: dict[str, int], configured: int, axis: str) -> int:
    """Return the one size of an axis. A size of 1 in the config is no contradiction.

    Raises ConfigError for several.
    """
    size = configured
    for where, each in said.items():
        if size == 1:
            size = each
        if each != size:
            rest = (
                f"parallel.{axis} of the config, which is {configured}"
                if configured > 1
                else next(iter(said))
            )
            raise ConfigError([f"{where} contradicts {rest}: make them equal"])
    return size


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


# -- groups -----------------------------------------------------------------------------------------
#
# ``deepspeed.utils.groups``: data, tensor, expert and sequence parallelism.


def _newest() -> Any:
    """Return the newest engine's communicator, or None."""
    return max(open_comms, key=lambda comm: int(comm.number), default=None)


def _axis(name: str) -> Any:
    """Return the newest engine's axis of a name, or None."""
    comm = _newest()
    return None if comm is None else comm.axes.get(name)


def _mesh() -> MeshShape:
    """Return the mesh of ranks."""
    comm = _newest()
    return MeshShape(dist.get_world_size()) if comm is None else comm.mesh


def _get_sequence_data_parallel_group() -> Any:
    """Return the group of the ranks whose gradients are averaged."""
    comm = _newest()
    if comm is None or comm.data.size == comm.world_size:
        return dist.group.WORLD
    return comm.data.gather_group


def _get_sequence_data_parallel_world_size() -> int:
    """Return how many ranks' gradients are averaged."""
    comm = _newest()
    return dist.get_world_size() if comm is None else int(comm.data.size)


def _get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    comm = _newest()
    return dist.get_rank() if comm is None else int(comm.data.position)


def _get_data_parallel_group() -> Any:
    """Return the group of the ranks that train on different samples. Raises RuntimeError where some of them
    share sequences: no group has one rank of each then.
    """
    if _mesh().sequence > 1:
        raise RuntimeError(
            "with sequence parallelism, gradients are averaged over "
            "_get_sequence_data_parallel_group(): use that group"
        )
    return _get_sequence_data_parallel_group()


def _get_data_parallel_world_size() -> int:
    """Return how many ranks train on different samples."""
    return _mesh().samples


def _get_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    return _mesh().sample_position(dist.get_rank())


def _get_model_parallel_world_size() -> int:
    """Return how many ranks share each layer."""
    return _mesh().tensor


def _get_model_parallel_rank() -> int:
    """Return this rank's place among those."""
    return dist.get_rank() % _get_model_parallel_world_size()


def _get_model_parallel_group() -> Any:
    """Return the group of the ranks that share each layer; None where each has whole layers."""
    axis = _axis("tensor")
    return None if axis is None else axis.group


def _expert_axis(group_name: str | None) -> Axis | None:
    """Return the axis of ranks with different experts. Raises ValueError for the name of another size."""
    axis: Axis | None = _axis("expert")
    name = f"ep_size_{1 if axis is None else axis.size}"
    if group_name not in (None, name):
        raise ValueError(f"unknown expert-parallel group {group_name!r}: the only group is {name!r}")
    return axis


def _get_expert_parallel_world_size(group_name: str | None = None) -> int:
    """Return how many ranks have different experts."""
    axis = _expert_axis(group_name)
    return 1 if axis is None else axis.size


def _get_expert_parallel_rank(group_name: str | None = None) -> int:
    """Return this rank's place among those."""
    axis = _expert_axis(group_name)
    return 0 if axis is None else axis.rank


def _get_expert_parallel_group(group_name: str | None = None) -> Any:
    """Return the group of the ranks that have different experts; None where all have all."""
    axis = _expert_axis(group_name)
    return None if axis is None else axis.group


def _get_expert_data_parallel_world_size(group_name: str | None = None) -> int:
    """Return how many ranks with different samples have this rank's experts."""
    return _get_sequence_data_parallel_world_size() // _get_expert_parallel_world_size(group_name)


def _get_expert_data_parallel_rank(group_name: str | None = None) -> int:
    """Return this rank's place among those."""
    axis = _expert_axis(group_name)
    if axis is None or axis.comm.experts is None:
        return _get_sequence_data_parallel_rank()
    return int(axis.comm.experts.position)


def _get_expert_data_parallel_group(group_name: str | None = None) -> Any:
    """Return the group of the ranks that have this rank's experts."""
    axis = _expert_axis(group_name)
    if axis is None or axis.comm.experts is None:
        return _get_sequence_data_parallel_group()
    return axis.comm.experts.gather_group


def _get_sequence_parallel_world_size() -> int:
    """Return how many ranks have parts of the same sequences."""
    return max(_mesh().sequence, sequence_groups.get_sequence_parallel_world_size())


def _get_sequence_parallel_rank() -> int:
    """Return this rank's place among those."""
    mesh = _mesh()
    if mesh.sequence == 1:
        return sequence_groups.get_sequence_parallel_rank()
    return mesh.coordinates(dist.get_rank())["sequence"]


def _get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that have parts of the same sequences; None where all have whole ones."""
    axis = _axis("sequence")
    if axis is not None:
        return axis.group
    alone = sequence_groups.get_sequence_parallel_world_size() == 1
    return None if alone else sequence_groups.get_sequence_parallel_group()


_get_tensor_model_parallel_world_size = _get_model_parallel_world_size
_get_tensor_model_parallel_rank = _get_model_parallel_rank
_get_tensor_model_parallel_group = _get_model_parallel_group
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank

__all__ = [name for name in globals() if "_parallel_" in name]
