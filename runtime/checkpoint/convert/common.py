"""Describes checkpoints of other programs as they are read, before they are written in our format."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..format.manifest import VALUE
from ..format.tensor_file import CheckpointError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Holds one parameter."""

    dtype: torch.dtype
    """The dtype that the model computed in."""
    shape: tuple[int, ...]
    trainable: bool = True
    group: int = 0
    contents: Mapping[str, tuple[torch.dtype, Sequence[Tensor]]]
    """VALUE and the optimizer's tensors, each of the parameter's size: its dtype and consecutive pieces."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Further entries that the optimizer keeps for the parameter, as [dtype or "", value]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """Holds a whole checkpoint. Floating tensors that may be buffers count as parameters."""

    parameters: Mapping[str, Foreign]
    buffers: Mapping[str, Tensor]
    tied: Mapping[str, str]
    facts: Mapping[str, Any]
    """The manifest's entries, not encoded: engine, optimizer, scheduler, loss_scaler, client_state, stage."""
    left_out: tuple[str, ...] = ()
    """Names of entries that were not read."""


def whole(tensor: Tensor, *, trainable: bool = True) -> Foreign:
    """Describe a parameter that is one tensor; the value of one that trains becomes fp32 or wider."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if trainable else tensor.dtype
    return Foreign(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        trainable=trainable,
        contents={VALUE: (dtype, [tensor])},
    )


def with_ties(state: Mapping[str, Tensor]) -> tuple[dict[str, Foreign], dict[str, str]]:
    """Describe tensors as parameters, each once; return further names of one memory with its first name."""
    parameters: dict[str, Foreign] = {}
    tied: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        # Memory alone is not enough: a view of a part of a tensor may begin at the same address.
        place = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())
        first = known.setdefault(place, name) if tensor.numel() else name
        if first == name:
            parameters[name] = whole(tensor)
        else:
            tied[name] = first
    return parameters, tied


def check_sums(file: Path | IO[bytes]) -> None:
    """Compare what a file of torch.save holds with its checksums, which torch.load does not. Raises
    ValueError if it is damaged; a file that was written without checksums passes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC:  # zero where torch.serialization.set_crc32_options(False) has left them out
                    with archive.open(record) as content:
                        while content.read(_CHUNK):
                            pass
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is damaged: {error}") from None


def load_torch(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """Read a torch file, mapped, on the CPU, without running code from it. Raises CheckpointError."""
    try:
        with torch.serialization.safe_globals(list(allowed)):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_sums(path)
        return found
    except pickle.UnpicklingError as error:
        text = str(error).partition("\n")[0] if "GLOBAL" not in str(error) else _unknown(str(error))
        raise CheckpointError(
            f"{path}: contains pickled objects, which can run code, so zlaunch does not load it ({text}): "
            "save it again with only tensors, numbers and strings"
        ) from None
    except (RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read by torch: {str(error).partition(chr(10))[0]}"
        ) from None


def _unknown(text: str) -> str:
    """Return the part of torch's message that names the class."""
    start = text.find("GLOBAL")
    return " ".join(text[start:].split()[:2])
