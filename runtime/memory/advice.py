"""Adds advice on how to save memory to an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def advised(where: str, advice: Callable[[], str]) -> Iterator[None]:
    """Add ``advice()`` to a torch.OutOfMemoryError that leaves the context; ``where`` says what ran."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{error}\nzlaunch: out of memory in {where}: {advice()}") from error
