"""Finds and sets the hooks on saved tensors that are active on this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Holds a pack and an unpack function."""

_autograd: Any = torch._C._autograd


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


def _follow() -> Callable[[], Hooks | None]:
    """Track each push and pop from now on, for a torch (2.6) that does not tell which hooks are active.

    ``torch.autograd.graph.saved_tensors_hooks`` looks these functions up at each use.
    """
    entered = _Entered()
    real_push = _autograd._push_saved_tensors_default_hooks
    real_pop = _autograd._pop_saved_tensors_default_hooks

    def push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        real_push(pack, unpack)  # raises where hooks are disabled
        entered.hooks.append((pack, unpack))

    def pop() -> None:
        real_pop()
        if entered.hooks:  # empty where torch brought them to a thread of the backward pass
            entered.hooks.pop()

    _autograd._push_saved_tensors_default_hooks = push
    _autograd._pop_saved_tensors_default_hooks = pop
    return lambda: entered.hooks[-1] if entered.hooks else None


if hasattr(_autograd, "_top_saved_tensors_default_hooks"):
    top: Callable[[], Hooks | None] = partial(_autograd._top_saved_tensors_default_hooks, False)
else:
    top = _follow()


def push(hooks: Hooks) -> None:
    """Activate these hooks, above those that are active."""
    _autograd._push_saved_tensors_default_hooks(*hooks)


def pop() -> None:
    """Deactivate the top hooks."""
    _autograd._pop_saved_tensors_default_hooks()


def allowed() -> bool:
    """Tell whether torch lets hooks be activated: not inside ``torch.func.grad``."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())
