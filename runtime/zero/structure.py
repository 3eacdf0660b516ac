"""Finding the tensors inside whatever a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, mappings (Hugging Face outputs are such) and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 16 or value is None or isinstance(value, (str, bytes, int, float)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
