"""Defines hooks that belong to one model and do nothing on its copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
