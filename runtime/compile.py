"""Compiles the blocks of a model, as the config's section ``compile`` asks for.

A block's ``forward`` is compiled, not its call: the hooks that gather and free the block's parameters run
around the graph, so they break none. Equal blocks share one graph: dynamo takes parameters as its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .activation.checkpointing import CheckpointedForward, blocks_of, switch_off_caches
from .config import ConfigError
from .config.schema import Compile
from .log import warn
from .mesh import MeshShape


class _CompiledForward:
    """Replaces a block's ``forward``. A copy of the block, pickled or not, has the plain forward."""

    def __init__(
        self, block: nn.Module, plain: Callable[..., Any], options: dict[str, Any], *, own: bool
    ) -> None:
        self.block = block
        self.plain = plain
        self.own = own
        """Tells whether the plain forward was the block's own attribute, not its class's method."""
        self._compiled = torch.compile(plain, **options)
        functools.update_wrapper(self, plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.plain,)


def compile_blocks(model: nn.Module, section: Compile, mesh: MeshShape, *, warns: bool = True) -> list[str]:
    """Compile the blocks of a model, if the config says so, and return their names.

    Call this before activations are checkpointed, which wraps the compiled forward. A block that the script
    has compiled stays as it is. What an earlier engine has compiled is undone.

    Args:
        model: The model.
        section: The config's section ``compile``, with the arguments of ``torch.compile``.
        mesh: The mesh of ranks.
        warns: Whether this rank prints warnings.

    Raises:
        ConfigError: An argument is not torch's, the model has no blocks, or ranks share each layer: their
            collectives are no part of a graph.
    """
    _restore(model)
    if not section.enabled:
        return []
    for axis in mesh.axes:  # the config was checked before; a script can bring its own mesh
        if axis != "data":
            raise ConfigError([f"compile.enabled: does not go with parallel.{axis} above 1: set it to false"])
    known = torch._dynamo.list_backends(exclude_tags=())
    if section.backend not in known:
        names = ", ".join(known)
        raise ConfigError([f"compile.backend: unknown backend {section.backend!r}; torch has {names}"])
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError(
            [
                "compile.enabled: found no blocks to compile (members of a ModuleList): "
                "call model.compile() in the script instead"
            ]
        )
    free = [(name, block) for name, block in blocks if block._compiled_call_impl is None]
    if len(free) < len(blocks) and warns:
        warn(f"compile: {len(blocks) - len(free)} blocks are compiled by the script and stay as they are")
    switch_off_caches(model, "a KV cache would need one graph per compiled layer")
    if "backend" in section.kwargs:
        raise ConfigError(["compile.kwargs: set the backend in compile.backend"])
    options = {**section.kwargs, "backend": section.backend}
    for _, block in free:
        try:
            _compile(block, options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError([f"compile.kwargs: torch.compile rejects them: {error}"]) from None
    return [name for name, _ in free]


def _compile(block: nn.Module, options: dict[str, Any]) -> None:
    """Compile a block's forward, below the checkpointing of an earlier engine where that is still there."""
    around = _checkpointing_of(block)
    if around is None:
        own = "forward" in block.__dict__
        block.forward = _CompiledForward(block, block.forward, options, own=own)
    else:
        around.forward = _CompiledForward(block, around.forward, options, own=around.own)
        around.own = True


def _checkpointing_of(block: nn.Module) -> CheckpointedForward | None:
    forward = block.__dict__.get("forward")
    return forward if isinstance(forward, CheckpointedForward) else None


def _restore(model: nn.Module) -> None:
    """Give blocks that an earlier engine has compiled their plain forwards, also below its checkpointing."""
    for module in model.modules():
        around = _checkpointing_of(module)
        compiled = module.__dict__.get("forward") if around is None else around.forward
        if not isinstance(compiled, _CompiledForward) or compiled.block is not module:
            continue
        if around is not None:
            around.forward = compiled.plain
            around.own = compiled.own
        elif compiled.own:
            module.forward = compiled.plain
        else:
            del module.forward
