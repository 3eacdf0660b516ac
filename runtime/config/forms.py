"""Writes a key and its value as the JSON of a config file, for messages that show the right form."""

from __future__ import annotations

import json
import re
from typing import Any

from .fields import real
from .other_names import STEPS, read_optimizer, read_scheduler

_BARE = {
    "zero_optimization": "zero_optimization.stage",
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
    "optimizer": "optimizer.type",
    "optimizer.params": "optimizer.params.lr",
    "scheduler": "scheduler.type",
    "tensor_parallel": "parallel.tensor",
    "expert_parallel": "parallel.expert",
    "pipeline": "parallel.pipeline",
    "data_types": "data_types.grad_accum_dtype",
    "checkpoint.in_memory": "checkpoint.in_memory.every",
}
"""Section -> the key that somebody means who gives the section a single value."""
_SHOWN = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 1e-3,
    "scheduler.type": "WarmupLR",
    "data_types.grad_accum_dtype": "fp32",
}
"""Example values by key, for messages about values that do not fit."""


def form(path: str, value: Any) -> str:
    """Return the JSON of a file that sets the key ``path``: `"fp16": {"enabled": true}`."""
    *sections, name = path.split(".")
    text = f'"{name}": {json.dumps(value)}'
    for section in reversed(sections):
        text = f'"{section}": {{{text}}}'
    return text


def forms(values: dict[str, Any]) -> str:
    """Return the JSON that sets several keys, those of a section together."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        part = tree
        *sections, name = path.split(".")
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = value
    return json.dumps(tree)[1:-1].replace(f'"{STEPS}"', STEPS)


def required_form(path: str) -> str:
    """Return how to write a required key, behind a colon; "" if there is nothing to show."""
    return f": {form(path, _SHOWN[path])}" if path in _SHOWN else ""


def section_form(path: str, value: Any, has_switch: bool) -> str:
    """Return the JSON to write instead of a single value for a section; "" if there is no telling."""
    if has_switch and (on := as_switch(value)) is not None:
        return form(f"{path}.enabled", on)
    key = _BARE.get(path)
    if key is None:
        return form(f"{path}.enabled", True) if has_switch else ""
    if key == "optimizer.type":
        read = read_optimizer(value)
    elif key == "scheduler.type":
        read = read_scheduler(value)
    else:
        read = _plain(key, value)
    if not read and key not in _SHOWN:
        read = {key: 2}
    return forms(read or {key: _SHOWN[key]})


def _plain(key: str, value: Any) -> dict[str, Any]:
    if key.endswith(".device"):
        return {key: value} if value in ("cpu", "nvme", "none") else {}
    if key.endswith("_dtype"):
        return {key: value} if value in ("fp16", "bf16", "fp32") else {}
    if key == "zero_optimization.stage":
        stage = read_stage(value)
        return {} if stage is None else {key: stage}
    number = real(value)
    if key == "optimizer.params.lr":
        return {} if number is None else {key: number}
    return {key: int(number)} if number is not None and 1 <= number < 1 << 20 else {}


_STAGES = {
    "fullshard": 3,
    "shardgradop": 2,
    "noshard": 0,
    "hybridshard": 3,
    "hybridshardzero2": 2,
    "fsdp": 3,
    "ddp": 0,
}
"""Words of FSDP and Lightning for what is sharded."""


def read_stage(value: Any) -> int | None:
    """Return the ZeRO stage that a value of another tool means: 3, "zero3", "FULL_SHARD"; None if none."""
    if isinstance(value, str):
        for word in re.split(r"[\s,]+", value.lower()):
            if (known := _STAGES.get(word.replace("_", "").replace("-", ""))) is not None:
                return known
        match = re.search(r"(?:^|stage[_-]?|zero[_-]?)([0-3])(?![0-9])", value.lower())
        return int(match.group(1)) if match else None
    number = real(value)
    return int(number) if number in (0, 1, 2, 3) else None


def as_switch(value: Any) -> bool | None:
    """Return the switch that a value stands for: "true", "Yes" and 1 are true; None if it is none."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in ("true", "yes", "on", "1"):
        return True
    return False if text in ("false", "no", "off", "0") else None
