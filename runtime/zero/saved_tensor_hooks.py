"""Which hooks on saved tensors are in force on this thread, and how to put ours there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack."""

_autograd: Any = torch._C._autograd


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


def _follow() -> Callable[[], Hooks | None]:
    """Note each push and pop from now on, for a torch (2.6) that does not tell which hooks are in force.

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
    """Put these in force, above those that are."""
    _autograd._push_saved_tensors_default_hooks(*hooks)


def pop() -> None:
    """Take the top ones out of force."""
    _autograd._pop_saved_tensors_default_hooks()


def allowed() -> bool:
    """Tell whether torch lets hooks be put in force: not inside ``torch.func.grad``."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())
