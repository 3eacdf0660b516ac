"""Reads what torch.distributed.checkpoint (DCP) has written, by any number of ranks, and runs no code of it.

``.metadata`` is a pickle that says which chunk of which tensor is at which place in which file; a chunk is
what torch.save makes of it. Keys have the path of an entry in the state dict that was saved. A model's is
found by its place beside the optimizer's, whose ``state`` and ``param_groups`` have the parameters' names, as
torch.distributed.checkpoint.state_dict makes them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from ...optimizer_specs import SPECS
from ..format.manifest import VALUE
from ..format.tensor_file import NAMES, CheckpointError, to_json
from .common import Foreign, ForeignCheckpoint, check_sums

_METADATA = ".metadata"
_MALFORMED = (ArithmeticError, AttributeError, ImportError, MemoryError, SystemError, TypeError, ValueError)
"""Lists what a damaged pickle may raise besides its own errors."""
_MOST_TIED = 4
"""Bounds how many tensors of one shape are compared: a model has many layers of one."""
_MODELS = ("model", "module", "state_dict", "model_state_dict")
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"),
        *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)


class _Refused(pickle.UnpicklingError):
    """Names an object that is not made."""


class _Unpickler(pickle.Unpickler):
    """Makes the objects of such a file, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        # Exact names. A pickle can call whatever it finds, and a module has more than these classes.
        allowed = name in _CLASSES.get(module, ())
        if module == "torch":
            allowed = name in ("Size", "device") or isinstance(getattr(torch, name, None), _KINDS)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if not allowed:
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """Return the member of an enum. Python 3.11.2, Debian 12's, pickles one as an attribute of its class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise _Refused("builtins.getattr")
    return kind[name]


@dataclass(slots=True)
class _Entry:
    """Holds where a value is: the chunks of a tensor, or an object."""

    path: tuple[Any, ...]
    """Where it is in the state dict."""
    description: Any
    places: list[tuple[Sequence[int], Any]]
    """Offsets of each chunk, and its place in a file."""

    @property
    def is_tensor(self) -> bool:
        return hasattr(self.description, "chunks")


class _Chunked(Sequence[Tensor]):
    """Reads a tensor when it is asked for: one at a time is in memory."""

    def __init__(self, folder: Path, entry: _Entry) -> None:
        self._folder = folder
        self._entry = entry

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(1))]
        if index not in (0, -1):
            raise IndexError(index)
        return _read_tensor(self._folder, self._entry)


def is_distributed(path: Path) -> bool:
    """Tell whether a folder has such a checkpoint."""
    return (path / _METADATA).is_file()


def read_distributed(folder: Path) -> ForeignCheckpoint:
    """Read a model's state dict and the optimizer's, if it is there. Other entries are named as left out.

    Raises CheckpointError for files that are damaged or hold other objects, for several models, and for an
    optimizer's state without the parameters' names.
    """
    entries = _entries(folder)
    roots = {
        entry.path[:at]
        for entry in entries
        for at, part in enumerate(entry.path)
        if part == "param_groups" or (at == len(entry.path) - 1 and str(part).startswith("param_groups."))
    }
    kept: dict[tuple[Any, ...], _Entry] = {}
    rest: list[_Entry] = []
    for entry in entries:
        root = next((root for root in roots if entry.path[: len(root)] == root), None)
        inner = None if root is None else _inside(entry.path[len(root) :])
        if inner is None:
            rest.append(entry)
        else:
            kept[inner] = entry
    model, left_out = _choose_model(folder, rest)
    if len(roots) > 1:
        raise CheckpointError(
            f"{folder}: has the states of {len(roots)} optimizers, which cannot be imported"
        )
    groups, group_of = _groups(folder, kept)
    states: dict[str, dict[str, _Entry]] = {}
    for path, entry in kept.items():
        if path[0] == "state":
            states.setdefault(str(path[1]), {})[str(path[2])] = entry
    # State by numbers (optimizer.state_dict()) does not name its parameters.
    unknown = sorted(states.keys() - model.keys())
    if unknown:
        raise CheckpointError(
            f"{folder}: the optimizer has state of {unknown[0]!r}, which is not in the model: save it with "
            "torch.distributed.checkpoint.state_dict.get_state_dict"
        )
    parameters: dict[str, Foreign] = {}
    buffers: dict[str, Tensor] = {}
    tied = _ties(folder, model, states)
    for name, entry in model.items():
        if name in tied:
            continue
        if entry.description.properties.dtype.is_floating_point:
            parameters[name] = _describe(folder, entry, states.get(name, {}), group_of.get(name, 0))
        else:
            buffers[name] = _read_tensor(folder, entry)
    return ForeignCheckpoint(
        parameters=parameters,
        buffers=buffers,
        tied=tied,
        facts={"optimizer": {"class": None, "groups": groups}} if kept else {},
        left_out=left_out,
    )


def _entries(folder: Path) -> list[_Entry]:
    """Read the file that describes the others."""
    path = folder / _METADATA
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        places: dict[str, list[tuple[Sequence[int], Any]]] = {}
        for index, place in found.storage_data.items():
            places.setdefault(index.fqn, []).append((tuple(index.offset or ()), place))
        paths = found.planner_data or {}
        return [
            _Entry(tuple(paths.get(key, (key,))), description, places.get(key, []))
            for key, description in found.state_dict_metadata.items()
        ]
    except _Refused as error:
        raise CheckpointError(
            f"{path}: contains pickled objects, which can run code, so zlaunch does not load it ({error})"
        ) from None
    except (OSError, EOFError, pickle.UnpicklingError, LookupError, *_MALFORMED) as error:
        raise CheckpointError(f"{path}: is not a file of torch.distributed.checkpoint: {error}") from None


def _inside(path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return ("state", name, key) or ("param_groups", number or name, key) of a path in an optimizer's state
    dict, flat or not.
    """
    if len(path) == 1 and isinstance(path[0], str):
        kind, _, own = path[0].partition(".")
        name, _, key = own.rpartition(".")
        path = (kind, name, key)
    return path if len(path) == 3 and path[0] in ("state", "param_groups") else None


def _choose_model(folder: Path, rest: Sequence[_Entry]) -> tuple[dict[str, _Entry], tuple[str, ...]]:
    """Return the entries of the model by their names, and the names of those that are no part of it."""
    tensors: dict[tuple[Any, ...], dict[str, _Entry]] = {}
    for entry in rest:
        if entry.is_tensor:
            tensors.setdefault(entry.path[:-1], {})[str(entry.path[-1])] = entry
    if not tensors:
        raise CheckpointError(f"{folder}: contains no model tensors")
    # A usual name decides between several state dicts; a single one may have any name.
    named = [prefix for prefix in tensors if prefix and prefix[-1] in _MODELS]
    choice = named or list(tensors)
    if len(choice) > 1:
        names = ", ".join(".".join(map(str, prefix)) or "the top" for prefix in choice)
        raise CheckpointError(f"{folder}: has several state dicts ({names}): save only the model's")
    model = tensors[choice[0]]
    own = {id(entry) for entry in model.values()}
    left_out = tuple(".".join(map(str, entry.path)) for entry in rest if id(entry) not in own)
    if all(name.startswith("module.") for name in model):
        model = {name.removeprefix("module."): entry for name, entry in model.items()}
    return model, left_out


def _ties(folder: Path, model: Mapping[str, _Entry], states: Mapping[str, Any]) -> dict[str, str]:
    """Return names of tied weights with the name of the first: torch saves each, and the state of one.

    Tied are matrices of one shape, which at most a few have, and of equal values, that are not all the same.
    A model in which they are separate loads them, too.
    """
    shapes: dict[Any, list[str]] = {}
    for name, entry in model.items():
        if len(entry.description.size) > 1 and entry.description.properties.dtype.is_floating_point:
            shapes.setdefault((entry.description.properties.dtype, entry.description.size), []).append(name)
    tied: dict[str, str] = {}
    for names in shapes.values():
        if not 1 < len(names) <= _MOST_TIED or all(name in states for name in names):
            continue
        # The name with state is the first: state is saved under that one alone.
        first, *others = sorted(names, key=lambda name: name not in states)
        value = _read_tensor(folder, model[first])
        if value.numel() and bool((value != value.reshape(-1)[0]).any()):
            same = [name for name in others if name not in states]
            tied |= {name: first for name in same if torch.equal(value, _read_tensor(folder, model[name]))}
    return tied


def _groups(
    folder: Path, kept: Mapping[tuple[Any, ...], _Entry]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the options of the optimizer's groups, and the group of each parameter."""
    options: dict[Any, dict[str, Any]] = {}
    for path, entry in kept.items():
        if path[0] == "param_groups":
            value = _read_tensor(folder, entry) if entry.is_tensor else _read_object(folder, entry)
            options.setdefault(path[1], {})[str(path[2])] = value
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    for key, own in options.items():
        names = own.pop("params", [key])
        # How torch computes, which each run chooses for itself.
        for state in ("foreach", "fused", "capturable", "differentiable"):
            own.pop(state, None)
        if isinstance(key, str) and own in groups:  # each parameter has its options, and groups follow
            number = groups.index(own)
        else:
            groups.append(own)
            number = len(groups) - 1
        group_of |= dict.fromkeys(map(str, names), number)
    return groups, group_of


_OF_NO_ELEMENT = ("step", "RMS")
"""Names 0-dim entries that are no state of each element, also of a parameter without dimensions."""
_PARAMETER_STATES = {name for spec in SPECS for name in spec.parameter_states}


def _describe(folder: Path, entry: _Entry, states: Mapping[str, _Entry], group: int) -> Foreign:
    """Describe a parameter; its values become fp32 or wider."""
    shape = tuple(entry.description.size)
    dtype = entry.description.properties.dtype
    wide = torch.promote_types(dtype, torch.float32)
    contents: dict[str, tuple[torch.dtype, Sequence[Tensor]]] = {VALUE: (wide, _Chunked(folder, entry))}
    scalars: dict[str, Any] = {}
    for key, state in states.items():
        if not state.is_tensor:
            scalars[key] = ["", _read_object(folder, state)]
        elif tuple(state.description.size) == shape and key not in _OF_NO_ELEMENT:
            contents[key] = (state.description.properties.dtype, _Chunked(folder, state))
        elif len(state.description.size) == 0:
            scalars[key] = [NAMES[state.description.properties.dtype], _read_tensor(folder, state).item()]
        elif key in _PARAMETER_STATES:
            scalars[key] = [NAMES[state.description.properties.dtype], to_json(_read_tensor(folder, state))]
        else:
            where = ".".join(map(str, state.path))
            raise CheckpointError(
                f"{folder}: {where} has shape {list(state.description.size)}, expected its parameter's "
                f"{list(shape)} or a scalar"
            )
    return Foreign(dtype=dtype, shape=shape, group=group, contents=contents, scalars=scalars)


def _read_tensor(folder: Path, entry: _Entry) -> Tensor:
    """Read a tensor from its chunks."""
    whole = torch.empty(tuple(entry.description.size), dtype=entry.description.properties.dtype)
    numel = 0
    for (offsets, _), part in zip(entry.places, _loaded(folder, entry), strict=True):
        target = whole
        for dim, (start, length) in enumerate(zip(offsets, getattr(part, "shape", ()), strict=False)):
            target = target.narrow(dim, start, length)
        if not isinstance(part, Tensor) or part.shape != target.shape:
            raise CheckpointError(
                f"{folder}: a chunk of {'.'.join(map(str, entry.path))} has a different shape"
            )
        target.copy_(part)
        numel += part.numel()
    # Chunks that are missing would leave uninitialized memory.
    if numel != whole.numel():
        name = ".".join(map(str, entry.path))
        raise CheckpointError(f"{folder}: {name} has {numel} elements of {whole.numel()}")
    return whole


def _read_object(folder: Path, entry: _Entry) -> Any:
    """Read a number, a text or a list of those."""
    found = list(_loaded(folder, entry))
    return found[0] if found else None


def _loaded(folder: Path, entry: _Entry) -> Iterator[Any]:
    for _, place in entry.places:
        path = folder / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{path}: is compressed ({place.transform_descriptors}), which is not supported"
            )
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            found = torch.load(content, map_location="cpu", weights_only=True)
            check_sums(content)
        except pickle.UnpicklingError:
            name = ".".join(map(str, entry.path))
            raise CheckpointError(
                f"{path}: {name} contains pickled objects, which can run code, so zlaunch does not load it"
            ) from None
        except (OSError, RuntimeError, EOFError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read by torch: {str(error).partition(chr(10))[0]}"
            ) from None
        yield found
