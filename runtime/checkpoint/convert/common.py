"""What checkpoints of others are read into."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format.tensor_file import CheckpointError

Pieces = Callable[[], Iterator[Tensor]]
"""Flat tensors that follow one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One parameter."""

    dtype: torch.dtype
    """What the model computed in."""
    shape: tuple[int, ...]
    trainable: bool = True
    group: int = 0
    contents: Mapping[str, tuple[torch.dtype, Pieces]]
    """VALUE and the optimizer's tensors, each of the parameter's size."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """What else the optimizer keeps for it, as [dtype or "", value]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """All of it. Floating tensors that may be buffers count as parameters."""

    parameters: Mapping[str, Foreign]
    buffers: Mapping[str, Tensor]
    tied: Mapping[str, str]
    facts: Mapping[str, Any]
    """As in our manifest, not encoded: engine, optimizer, scheduler, loss_scaler, client_state, stage."""


def load_torch(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """A torch file, mapped, on the CPU, without running code of its own. Raises CheckpointError."""
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        text = str(error).partition("\n")[0] if "GLOBAL" not in str(error) else _unknown(str(error))
        raise CheckpointError(
            f"{path}: holds objects that are not loaded, for they could run any code ({text}): save it again "
            "with tensors, numbers and strings alone"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read by torch: {str(error).partition(chr(10))[0]}"
        ) from None


def _unknown(text: str) -> str:
    """The part of torch's message that names the class."""
    start = text.find("GLOBAL")
    return " ".join(text[start:].split()[:2])
