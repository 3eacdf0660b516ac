"""Compiles the blocks of a model, as the config's section ``compile`` asks for.

A block's ``forward`` is compiled, not its call: the hooks that gather and free the block's parameters run
around the graph, so they break none. Equal blocks share one graph: dynamo takes parameters as its inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .activation.checkpointing import blocks_of, switch_off_caches
from .config import ConfigError
from .config.schema import Compile
from .log import warn
from .mesh import MeshShape


class _CompiledForward:
    """Replaces a block's ``forward``. A copy of the block, pickled or not, has the plain forward."""

    def __init__(self, block: nn.Module, options: dict[str, Any]) -> None:
        self._plain = block.forward
        self._compiled = torch.compile(block.forward, **options)
        functools.update_wrapper(self, block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._plain,)


def compile_blocks(model: nn.Module, section: Compile, mesh: MeshShape, *, warns: bool = True) -> list[str]:
    """Compile the blocks of a model, if the config says so, and return their names.

    Call this before activations are checkpointed, which wraps the compiled forward. A block that is compiled
    already, by the script or by an earlier engine, stays as it is.

    Args:
        model: The model.
        section: The config's section ``compile``, with the arguments of ``torch.compile``.
        mesh: The mesh of ranks.
        warns: Whether this rank prints warnings.

    Raises:
        ConfigError: An argument is not torch's, the model has no blocks, or ranks share each layer: their
            collectives are no part of a graph.
    """
    if not section.enabled:
        return []
    for axis in mesh.axes:  # those of the config are rejected before; a script may bring others
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
    free = [(name, block) for name, block in blocks if not _is_compiled(block)]
    if len(free) < len(blocks) and warns:
        warn(f"compile: {len(blocks) - len(free)} blocks are compiled already and stay as they are")
    switch_off_caches(model, "with a KV cache, each compiled layer would need a graph of its own")
    options = {**section.kwargs, "backend": section.backend}
    for _, block in free:
        try:
            block.forward = _CompiledForward(block, options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError([f"compile.kwargs: torch.compile rejects them: {error}"]) from None
    return [name for name, _ in free]


def _is_compiled(block: nn.Module) -> bool:
    """Tell whether a block is compiled, also below the forward of an earlier engine's checkpointing."""
    forward = block.forward
    inner = getattr(forward, "forward", forward)
    return block._compiled_call_impl is not None or isinstance(inner, _CompiledForward)
