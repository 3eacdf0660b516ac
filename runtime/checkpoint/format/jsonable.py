"""Writes plain values and tensors as JSON beside safetensors: what a checkpoint holds besides weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from .tensor_file import NAMES, CheckpointError

_MARKS = ("__tensor__", "__tuple__", "__items__", "__float__", "__counter__")


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Encode ``value`` as JSON; its tensors are put into ``tensors``, under names that begin with ``where``.

    It may hold None, bool, int, float, str, tensors, and lists, tuples and dicts of them. Raises
    CheckpointError, naming the place inside, for anything else.
    """
    return _encode(value, tensors, where, where)


def _encode(value: Any, tensors: dict[str, Tensor], root: str, where: str) -> Any:
    # JSON has no NaN and no infinity; Python writes them, and other readers fail.
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(float(value))}
    # json.loads() refuses integers of more than 4300 digits: the whole manifest would be unreadable.
    if isinstance(value, int) and value.bit_length() > 4096:
        raise CheckpointError(f"{where} is a number of {value.bit_length()} bits, which is too large")
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        # bool first, because it is an int. Subclasses (numpy.float64) become plain values.
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)
        return None
    if isinstance(value, Tensor):
        if value.dtype not in NAMES or value.is_sparse:
            raise CheckpointError(f"{where} is a {value.dtype} {value.layout} tensor, which cannot be saved")
        name = f"{root}.{len(tensors):04d}"
        tensors[name] = value
        return {"__tensor__": name}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, root, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    # torch's MultiStepLR has its milestones in a Counter, and reads them as one.
    if type(value) is Counter:
        return {"__counter__": _encode(dict(value), tensors, root, where)}
    if isinstance(value, Mapping):
        # JSON turns every key into a string, and a dict with a key like "__tuple__" would be decoded as a
        # mark.
        plain_keys = all(type(key) is str for key in value) and not any(mark in value for mark in _MARKS)
        pairs = [
            (key, _encode(key, tensors, root, f"a key of {where}"), item, f"{where}[{key!r}]")
            for key, item in value.items()
        ]
        if plain_keys:
            return {key: _encode(item, tensors, root, place) for key, _, item, place in pairs}
        return {"__items__": [[key, _encode(item, tensors, root, place)] for _, key, item, place in pairs]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{where} is a {kind}: a checkpoint takes None, numbers, strings, tensors, and lists, tuples and "
        f"dicts of them (no pickled objects){_advice(value)}"
    )


def _advice(value: Any) -> str:
    for name in ("state_dict", "tolist"):
        if callable(getattr(value, name, None)):
            return f"; save its .{name}()"
    return "; save vars(it)" if hasattr(value, "__dict__") and not callable(value) else ""


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Decode what :func:`encode` has returned; ``tensor`` returns a tensor by name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (mark, content) = next(iter(value.items()))
        if mark == "__tensor__":
            return tensor(content)
        if mark == "__tuple__":
            return tuple(decode(item, tensor) for item in content)
        if mark == "__counter__":
            return Counter(decode(content, tensor))
        if mark == "__float__":
            return float(content)
        if mark == "__items__":
            return {_key(decode(key, tensor)): decode(item, tensor) for key, item in content}
    return {key: decode(item, tensor) for key, item in value.items()}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
