"""Makes an error of one rank an error of all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from ..comm.pending import Exchange
from .format.tensor_file import CheckpointError


def all_or_none(exchange: Exchange, rank: int, action: Callable[[], Any], *, own: bool = False) -> Any:
    """Run ``action`` on each rank; return every rank's result, or with ``own`` this rank's alone. Collective.

    Raises CheckpointError, with one text on all ranks, if it failed anywhere.
    """
    result, problem = None, None
    try:
        result = action()
    except OSError as error:
        problem = f"rank {rank}: {_text(error)}"
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # the others wait; whatever it is, they have to hear of it
        problem = f"rank {rank}: {type(error).__name__}: {error}"
    try:
        answers = exchange((None if own else result, problem))
    except RuntimeError as error:  # what torch raises when a connection breaks
        raise CheckpointError(f"another rank failed during the checkpoint: {error}") from None
    problems = [text for _, text in answers if text]
    if problems:
        raise CheckpointError(problems[0])
    return result if own else [answer for answer, _ in answers]


def _text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk: free space, or save to another folder"
    return f"{where}{error.strerror or error}"
