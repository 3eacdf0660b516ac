"""Checkpoint activations: keep only a function's inputs and recompute it in the backward pass.

Public as ``zlaunch.checkpointing``, with DeepSpeed's names. Call :func:`configure` once, then
``checkpoint(layer, x)`` in the model's forward. Or call :func:`checkpoint_blocks` on an unchanged model, as
the config's ``activation_checkpointing.enabled`` does. ``torch.utils.checkpoint`` recomputes the function,
without reentrant autograd; ``offload.py`` stores the inputs.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from ..comm.collectives import Comm
from ..comm.process_group import open_comms, running_comm
from ..config import load
from ..config.schema import ActivationCheckpointing
from ..environment import read_environment
from ..log import say, warn
from ..models import causal_model
from ..zero.policy import find_modules
from . import offload
from .offload import ActivationPlacement, Segment, group_getter
from .tiles import LossParts, chunk_loss, tile_loss, tile_mlps
from .tiles import tiled as tiled
from .tiles import tiled_cross_entropy as tiled_cross_entropy


@dataclass(slots=True)
class _Settings:
    configured: bool = False
    number: int | None = None
    place: ActivationPlacement = field(default_factory=ActivationPlacement)
    warned: bool = False


_settings = _Settings()
"""Holds what the script has chosen. Engines have copies with their configs' choices, ``comm.activations``."""
_inside = threading.local()


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure how checkpointed inputs are stored, for all engines and for calls without an engine.

    The config of an engine overrides these settings. An argument of None changes nothing. Arguments that are
    not listed are accepted for compatibility and have no effect.

    Args:
        mpu_: Object with ``get_model_parallel_group()`` or ``get_tensor_model_parallel_group()``, which
            returns the ranks that hold equal activations.
        deepspeed_config: Config with a section ``activation_checkpointing``; the other arguments override
            it.
        partition_activations: Shard large floating-point inputs over those ranks. The backward pass
            all-gathers them.
        checkpoint_in_cpu: Offload inputs on a GPU to host memory.
        num_checkpoints: Default of :func:`checkpoint_blocks`.

    Raises:
        ConfigError: The config is invalid.
        TypeError: ``mpu_`` has no such method.
    """
    if mpu_ is not None:
        group_getter(mpu_)
    section = None
    if deepspeed_config is not None:
        section = load(deepspeed_config).config.activation_checkpointing
        num_checkpoints = section.number_checkpoints if num_checkpoints is None else num_checkpoints
    for each in _all_settings():
        if mpu_ is not None:
            each.place.mpu = mpu_
            each.place.replicated = False
        if section is not None:
            _take(each, section)
        if partition_activations is not None:
            each.place.partition = partition_activations
        if checkpoint_in_cpu is not None:
            each.place.in_cpu = checkpoint_in_cpu
        each.configured = True
    if num_checkpoints is not None:
        set_num_layers(num_checkpoints)
    _check_partition(_settings)


def _take(settings: _Settings, section: ActivationCheckpointing) -> None:
    """Take what a config's section gives."""
    given = section.model_fields_set
    if "partition_activations" in given:
        settings.place.partition = section.partition_activations
    if "cpu_checkpointing" in given:
        settings.place.in_cpu = section.cpu_checkpointing
    settings.configured = settings.configured or bool(given)


def _check_partition(settings: _Settings) -> None:
    """Warn once where slices are asked for, and no ranks are known to keep them."""
    if settings.place.partition and settings.place.mpu is None and not _settings.warned:
        _settings.warned = True
        _warn(
            "partition_activations has no effect without model parallelism: pass mpu_ to "
            "zlaunch.checkpointing.configure"
        )


def _all_settings() -> list[_Settings]:
    """Return the script's settings and those of all engines."""
    return [_settings, *(comm.activations for comm in open_comms if comm.activations is not None)]


def _present() -> _Settings:
    """Return the settings of the engine whose pass is going on; outside of all passes those of the only
    engine, or the script's.
    """
    comm = running_comm() or (next(iter(open_comms)) if len(open_comms) == 1 else None)
    own: _Settings | None = None if comm is None else comm.activations
    return _settings if own is None else own


def apply(
    model: nn.Module, section: ActivationCheckpointing, comm: Comm, parts: LossParts | None = None
) -> None:
    """Apply the config's section for :func:`zlaunch.initialize`, to this engine alone: keys that are not
    given are as the script has configured them. ``parts`` says how ranks that share sequences add up a loss.
    """
    comm.activations = own = replace(_settings, place=replace(_settings.place))
    _take(own, section)
    _check_partition(own)
    if section.tiled_mlp:
        tile_mlps(model, section.tile_tokens)
    chunk_loss(causal_model(model), wanted=section.chunked_loss)
    if section.tiled_loss:
        tile_loss(causal_model(model), parts, section.tile_tokens)
        if comm.rank == 0:
            say("tiled_loss: in training, the model's output has no logits (None)")
    if section.enabled:
        checkpoint_blocks(model, section.number_checkpoints)


def is_configured() -> bool:
    """Return True after :func:`configure`, or after ``initialize`` with a config that has this section."""
    return any(each.configured for each in _all_settings())


def model_parallel_rank() -> int:
    """Return this rank's tensor-parallel rank by the ``mpu_`` of :func:`configure`, 0 without one."""
    mpu = _settings.place.mpu
    return 0 if mpu is None else dist.get_rank(group_getter(mpu)())


def set_num_layers(nlayers: int) -> None:
    """Set the default number of blocks of :func:`checkpoint_blocks`."""
    _settings.number = nlayers


def reset() -> None:
    """Return unused host memory to the system, and keep the settings."""
    offload.trim()


def _warn(message: str) -> None:
    if read_environment().rank == 0:
        warn(message)


# -- a call


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its arguments for the backward pass.

    Arguments and results can be anything. Tensors passed directly as arguments (not inside a list, for
    example) are stored as :func:`configure` says. The recomputation draws the same random numbers. Without
    gradients, this is a plain call. Inside another checkpointed call, and under torch.compile, it is torch's
    checkpoint.

    Raises:
        RuntimeError: An argument was modified in place before the backward pass.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        if recomputation.has_state():
            return _uncompiled(function, *args, **kwargs)
        return _torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    # All by position: torch leaves tensors among keywords out of what it saves, and of the devices whose
    # random state it keeps. Parameters come back as themselves: ZeRO may have moved their values meanwhile.
    values = (*args, *kwargs.values())
    names = tuple(kwargs)
    count = len(args)
    themselves = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and type(v) is not Tensor}

    def run(*saved: Any) -> Any:
        again = [themselves.get(i, value) for i, value in enumerate(saved)]
        with _nested():
            return function(*again[:count], **dict(zip(names, again[count:], strict=True)))

    with _keep_elsewhere():
        return _torch_checkpoint(run, *values, use_reentrant=False, context_fn=_contexts)


# Not torch.compiler.disable, which imports the compiler at once: a second for each script that imports
# zlaunch. torch's optimizers use this one, for the same reason.
_uncompiled: Callable[..., Any] = torch._disable_dynamo(checkpoint)  # type: ignore[attr-defined]


class Recomputation:
    """Restores no state besides torch's for a recomputed call. Megatron's random-number tracker replaces
    :data:`recomputation`, to restore its own.
    """

    def has_state(self) -> bool:
        """Return True if there is state, which torch.compile would not restore."""
        return False

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which a call that begins now is recomputed, in each backward pass."""
        return nullcontext()


recomputation = Recomputation()


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a call: while it runs, and while it is recomputed."""
    return nullcontext(), recomputation.context()


non_reentrant_checkpoint = checkpoint
"""Another name for :func:`checkpoint`: DeepSpeed has two implementations, zlaunch has one."""


@contextmanager
def _nested() -> Iterator[None]:
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _keep_elsewhere() -> AbstractContextManager[Any]:
    """Return hooks on what torch saves of a call's arguments.

    A call inside another gets none: its arguments are recomputed as well, and our hooks would take them out
    of the outer call's hands.
    """
    place = _present().place
    if getattr(_inside, "depth", 0) or not (place.in_cpu or place.group() is not None):
        return nullcontext()
    segment = Segment(place)
    return saved_tensors_hooks(segment.keep, segment.take)


# -- blocks of a model


class CheckpointedForward:
    """Replaces a block's ``forward``, inside ``__call__``: hooks run around it, once.

    A copy of the block, pickled or not, has the plain forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward
        self.own = "forward" in module.__dict__
        functools.update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.forward,)


def has_blocks(model: nn.Module) -> bool:
    """Tell whether a model has blocks that :func:`checkpoint_blocks` would find."""
    return bool(blocks_of(model))


def checkpoint_blocks(model: nn.Module, number_checkpoints: int | None = None) -> list[str]:
    """Checkpoint the blocks of a model during training, and return their names.

    Blocks are the members of the model's ModuleLists, such as transformer layers; in nested lists, the
    members of the inner ones. Members of Sequentials count if they have submodules. Blocks that Hugging
    Face's ``gradient_checkpointing`` already checkpoints are skipped. Modules keep their class, names and
    state_dict. ``use_cache`` in a Hugging Face config is set to False. A second call replaces the first.

    Args:
        model: The model.
        number_checkpoints: Number of blocks to checkpoint, evenly spaced; 0 undoes an earlier call. Fewer
            checkpoints take more memory and less time. None is the number of :func:`configure`, or all
            blocks.

    Raises:
        ValueError: The model has no blocks, or the number is negative.
    """
    number = _settings.number if number_checkpoints is None else number_checkpoints
    if number is not None and number < 0:
        raise ValueError(f"number_checkpoints must be 0 or more, got {number}")
    for module in model.modules():
        present = module.__dict__.get("forward")
        if isinstance(present, CheckpointedForward) and present.module is module:
            del module.forward
            if present.own:
                module.forward = present.forward
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            "found no blocks to checkpoint (members of a ModuleList): call zlaunch.checkpointing.checkpoint "
            "in the model's forward instead"
        )
    free = [(name, block) for name, block in blocks if not _checkpoints_itself(model, name, block)]
    if len(free) < len(blocks):
        _warn(
            f"skipped {len(blocks) - len(free)} blocks that the model already checkpoints "
            "(gradient_checkpointing)"
        )
    count = len(free) if number is None else min(number, len(free))
    chosen = [free[index * len(free) // count] for index in range(count)]
    if chosen:
        switch_off_caches(model, "checkpointed blocks cannot fill a KV cache")
    for _, block in chosen:
        block.forward = CheckpointedForward(block)
    return [name for name, _ in chosen]


def switch_off_caches(model: nn.Module, why: str) -> None:
    """Switch off a model's caches of keys and values, and warn with the reason.

    A checkpointed block would fill its cache again when it runs again; in a compiled block the cache of each
    layer is another graph.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False  # type: ignore[union-attr]
    if caching:
        _warn(f"set use_cache=False in the model's config: {why}")


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List a model's blocks with their names. A Sequential of modules without parts, in a list, is one."""
    found: dict[str, nn.Module] = {}
    for name, block in find_modules(model):
        around = name.rpartition(".")[0]
        parent = model.get_submodule(around)
        list_of_it = model.get_submodule(around.rpartition(".")[0])
        if isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and _has_parts(block)):
            found[name] = block
        elif isinstance(list_of_it, nn.ModuleList) and not any(map(_has_parts, parent.children())):
            found[around] = parent
    return list(found.items())


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _checkpoints_itself(model: nn.Module, name: str, block: nn.Module) -> bool:
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return any(getattr(m, "gradient_checkpointing", False) is True for m in (*around, *block.modules()))
