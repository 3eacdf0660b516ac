"""Adds advice on how to save memory to an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable

import torch


def raise_with_advice(error: BaseException | None, where: str, advice: Callable[[], str]) -> None:
    """Raise a torch.OutOfMemoryError again with ``advice()``; ``where`` says what ran. Others pass."""
    if isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(f"{error}\nzlaunch: out of memory in {where}: {advice()}") from error
