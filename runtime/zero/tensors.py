"""Finds the tensors inside a module's output, and hooks their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# -- output tensors ---------------------------------------------------------------------------------


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings (such as Hugging Face outputs) and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 16 or value is None or isinstance(value, (str, bytes, int, float)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


class _Once:
    """Calls a handler at the first of two gradients in a backward pass: a view's, and its base's."""

    __slots__ = ("_handler", "_last_pass")

    def __init__(self, handler: Callable[[], None]) -> None:
        self._handler = handler
        self._last_pass = -1

    def __call__(self, grad: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._last_pass:
            self._last_pass = number
            self._handler()


def arm(
    output: Any,
    handler: Callable[[], None],
    at_output: Callable[[Tensor], Tensor | None] | None = None,
) -> bool:
    """Call ``handler`` when the gradient of any tensor in ``output`` is known; return True if any will come.

    ``at_output`` is called instead for the tensors themselves, and may return another gradient.
    """
    armed = False
    hooked: set[int] = set()
    for tensor in tensors_in(output):
        if not tensor.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            continue
        armed = True
        hook = _Once(handler)
        # a view that is modified in place later is rebuilt from its base, and the hook on the view is lost
        for target, function in ((tensor, at_output or hook), (tensor._base, hook)):
            if target is None or not target.requires_grad or target.is_leaf or id(target) in hooked:
                continue
            hooked.add(id(target))
            target.register_hook(function)  # type: ignore[no-untyped-call]  # torch's own is untyped
    return armed


# -- inert hook -------------------------------------------------------------------------------------
#
# Defines hooks that belong to one model and do nothing on its copies.


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Hook:
    """Wraps a callable for torch's module hooks. Copied or pickled with its module, it becomes inert.

    Without this a copy of a model would drive the original's engine.
    """

    _from_public_api = True  # torch marks state-dict hooks so; a copy must keep the mark

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)
