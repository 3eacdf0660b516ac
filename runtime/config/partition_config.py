"""Reads ``tensor_parallel.partition_config``, in which DeepSpeed says how each layer is split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPEC_KEYS = frozenset(
    (
        *("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output"),
        "grad_allreduce",
    )
)
_TYPES = ("column", "row", "skip")
_OF_OTHERS = frozenset(("tp_size", "use_default_specs", "embedding_partition_dim", "lm_head_patterns"))
"""Names keys that change no result: sizes are said elsewhere, and embeddings follow the model's plan."""


@dataclass(frozen=True)
class LayerSpec:
    """Says how the layers are split whose weights have a name that a pattern matches from its beginning."""

    patterns: tuple[re.Pattern[str], ...]
    style: str
    """One of the styles of ``tensor_parallel.plan``."""
    model_types: tuple[str, ...] = ()
    """Names the model types that it is for; empty for all."""


@dataclass(frozen=True)
class PartitionConfig:
    """Holds the specs, of which the first that matches counts."""

    specs: tuple[LayerSpec, ...]
    is_strict: bool = False
    """Refuses linear layers that no spec matches."""

    def style_of(self, weight: str, model_type: str) -> str | None:
        """Return the style of the layer with a weight of this name, None without a spec."""
        for spec in self.specs:
            is_meant = not spec.model_types or model_type.lower() in spec.model_types
            if is_meant and any(pattern.match(weight) for pattern in spec.patterns):
                return spec.style
        return None


def read_partition_config(given: Mapping[str, Any]) -> PartitionConfig:
    """Return what the section says. Raises ValueError with the key for what is not supported."""
    unknown = sorted(given.keys() - _OF_OTHERS - {"layer_specs", "strict_mode"})
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown key")
    specs = given.get("layer_specs")
    if not isinstance(specs, list) or not specs:
        raise ValueError("layer_specs: expected a list of specs")
    found = tuple(_read_spec(spec, f"layer_specs[{index}]") for index, spec in enumerate(specs))
    return PartitionConfig(found, is_strict=bool(given.get("strict_mode", False)))


def _read_spec(given: Any, where: str) -> LayerSpec:
    if not isinstance(given, dict) or not given.get("patterns"):
        raise ValueError(f"{where}: expected an object with patterns")
    if unknown := sorted(given.keys() - _SPEC_KEYS):
        raise ValueError(f"{where}.{unknown[0]}: unknown key")
    kind = str(given.get("partition_type", "column")).lower()
    if kind not in _TYPES:
        raise ValueError(f"{where}.partition_type: {kind!r} is not one of {', '.join(_TYPES)}")
    try:
        patterns = tuple(re.compile(pattern) for pattern in given["patterns"])
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}.patterns: {error}") from None
    types = tuple(str(each).lower() for each in given.get("model_types") or ())
    return LayerSpec(patterns, _style(given, kind, where), types)


def _style(given: Mapping[str, Any], kind: str, where: str) -> str:
    """Return the name that Hugging Face's plans have for a spec's way to split."""
    dim = given.get("partition_dim")
    usual = {"column": 0, "row": 1, "skip": None}[kind]
    if dim not in (None, usual):
        raise ValueError(f"{where}.partition_dim: {dim} is not supported for {kind}, only {usual}")
    shape = given.get("shape")
    is_packed = shape is not None
    if is_packed and not (kind == "column" and shape == [2, -1]):
        raise ValueError(
            f"{where}.shape: {shape} is not supported, only [2, -1] for column: set tensor_parallel.plan, or "
            "split the layer into one for each part"
        )
    if kind == "skip":
        return "replicated_with_grad_allreduce" if given.get("grad_allreduce") else "replicate"
    if kind == "row":
        return "rowwise"
    if given.get("gather_output"):
        if is_packed:
            raise ValueError(f"{where}.gather_output: not supported with shape")
        return "colwise_gather_output"
    return "packed_colwise" if is_packed else "colwise"
