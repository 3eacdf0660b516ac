"""Checkpoints of others made into one of ours: torch files, safetensors, Hugging Face folders, DeepSpeed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .save import put_in_place, rank_file, replace_file, sync_folder, write_manifest
from .standalone import FORMAT, LATEST, NAMES, VALUE, VERSION, WHOLE, CheckpointError
from .values import encode
from .writer import FileWriter

Pieces = Callable[[], Iterator[Tensor]]
"""Flat tensors that follow one another."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_NESTED = ("state_dict", "model_state_dict", "model", "module")


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


def read_foreign(source: str | os.PathLike[str], tag: str | None = None) -> ForeignCheckpoint:
    """Find out what ``source`` is, and read it. Raises CheckpointError for what is none of it."""
    from .deepspeed import find_deepspeed, read_deepspeed

    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.is_file():
        return _plain([path])
    folder = find_deepspeed(path, tag)
    if folder is not None:
        return read_deepspeed(folder)
    for name in _INDEXES:
        if (path / name).exists():
            try:
                names = json.loads((path / name).read_text(encoding="utf-8"))["weight_map"].values()
            except (ValueError, KeyError, AttributeError, OSError) as error:
                raise CheckpointError(f"{path / name}: is not an index of weights: {error}") from None
            return _plain([path / file for file in dict.fromkeys(names)])
    for name in _SINGLES:
        if (path / name).exists():
            return _plain([path / name])
    raise CheckpointError(
        f"{path}: holds no checkpoint that is known: neither DeepSpeed's (*_model_states.pt), nor "
        f"{', '.join((*_SINGLES, *_INDEXES))}"
    )


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


def _plain(paths: Sequence[Path]) -> ForeignCheckpoint:
    state: dict[str, Tensor] = {}
    for path in paths:
        state |= _tensors_of(path)
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    parameters: dict[str, Foreign] = {}
    buffers: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            buffers[name] = tensor
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())
        first = known.setdefault(place, name) if tensor.numel() else name
        if first != name:
            tied[name] = first
            continue
        parameters[name] = Foreign(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            contents={VALUE: (torch.promote_types(tensor.dtype, torch.float32), _once(tensor))},
        )
    return ForeignCheckpoint(parameters=parameters, buffers=buffers, tied=tied, facts={})


def _once(tensor: Tensor) -> Pieces:
    return lambda: iter([tensor.reshape(-1)])


def _tensors_of(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: is missing")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is not a safetensors file: {error}") from None
    state = load_torch(path)
    for name in _NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path}: holds no state_dict")
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(f"{path}: {others[0]!r} is not a tensor, so this is not a model's state_dict")
    return dict(state)


def write_foreign(
    checkpoint: ForeignCheckpoint, folder: str | os.PathLike[str], tag: str = "imported", rank: int = 0
) -> Path:
    """Write it as ``folder/tag``, whole or not at all, and make it the latest; returns the path. Raises
    CheckpointError, OSError.
    """
    folder = Path(os.path.abspath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{tag}.{socket.gethostname()}-{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_into(checkpoint, temporary, rank)
        put_in_place(temporary, folder / tag)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    replace_file(folder / LATEST, tag.encode())
    sync_folder(folder)
    return folder / tag


def _write_into(checkpoint: ForeignCheckpoint, folder: Path, rank: int) -> None:
    from zlaunch import __version__

    file = rank_file(rank)
    announced = {
        f"{name}.{kind}": (dtype, (_numel(entry.shape),))
        for name, entry in checkpoint.parameters.items()
        for kind, (dtype, _) in entry.contents.items()
    }
    files: dict[str, Any] = {}
    writer = FileWriter(folder / file, announced)
    try:
        for name, entry in checkpoint.parameters.items():
            for kind, (dtype, pieces) in entry.contents.items():
                for piece in pieces():
                    for part in torch.split(piece, 1 << 20):
                        writer.write(f"{name}.{kind}", part.to(dtype))
        files[file] = {**writer.close(), "host": None}
    finally:
        writer.abandon()
    tensors: dict[str, Tensor] = {}
    facts = {name: encode(value, tensors, name) for name, value in checkpoint.facts.items()}
    whole = {**tensors, **{f"buffer.{name}": value for name, value in checkpoint.buffers.items()}}
    writer = FileWriter(folder / WHOLE, {name: (t.dtype, tuple(t.shape)) for name, t in whole.items()})
    try:
        for name, value in whole.items():
            writer.write(name, value)
        files[WHOLE] = {**writer.close(), "host": None}
    finally:
        writer.abandon()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "time": time.time(),
        "world_size": 1,
        "written_by": {"zlaunch": __version__, "torch": str(torch.__version__)},
        "stage": 0,
        "engine": {"global_steps": 0, "micro_steps": 0, "global_samples": 0, "skipped_steps": 0},
        "loss_scaler": None,
        "optimizer": None,
        "scheduler": None,
        "data": None,
        "config": None,
        "client_state": {},
        **facts,
        "rank_states": [],
        "parameters": {
            name: {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "trainable": entry.trainable,
                "group": entry.group,
                "state": {
                    "tensors": {k: NAMES[dtype] for k, (dtype, _) in entry.contents.items() if k != VALUE},
                    "scalars": dict(entry.scalars),
                },
                "slices": [[file, name, 0, 0, _numel(entry.shape)]],
            }
            for name, entry in checkpoint.parameters.items()
        },
        "excluded": [],
        "tied": dict(checkpoint.tied),
        "buffers": {
            name: {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
            for name, tensor in checkpoint.buffers.items()
        },
        "files": files,
    }
    write_manifest(folder, manifest)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
