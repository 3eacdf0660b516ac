"""Old spellings that DeepSpeed still takes, turned into today's before anything is checked."""

from __future__ import annotations

from typing import Any

Problems = list[tuple[str, str]]
_MOVED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def modern(data: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Return the config in today's spelling, leaving ``data`` as it is, and what is wrong with the old."""
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        return {**data, "zero_optimization": {"stage": int(zero)}}, []
    if not isinstance(zero, dict) or not zero.keys() & _MOVED.keys():
        return data, []
    problems: Problems = []
    moved = {key: value for key, value in zero.items() if not (key in _MOVED and isinstance(value, bool))}
    for old, new in _MOVED.items():
        if zero.get(old) is not True:
            continue
        if zero.get(new) is not None:
            problems.append((f"zero_optimization.{old}", f"is the old spelling of {new}, give only that"))
        else:
            moved[new] = {"device": "cpu"}
    return {**data, "zero_optimization": moved}, problems
