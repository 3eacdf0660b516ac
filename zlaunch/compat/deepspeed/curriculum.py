"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``: the difficulty of samples by the step.

The engine does not read it: a script asks for the difficulty and makes its batches accordingly, such as
sequences of that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from zlaunch.compat.deepspeed.tools import logger

_KEYS: dict[str, tuple[str, ...]] = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "custom": (),
}
"""Maps each type of schedule to the keys of its schedule_config."""
_TENSOR_CORES = 8


class CurriculumScheduler:
    """Returns the difficulty of a step.

    Args:
        config: Has ``min_difficulty``, ``max_difficulty``, ``schedule_type`` (``fixed_discrete``,
            ``fixed_linear``, ``fixed_root`` or ``custom``) and ``schedule_config``.

    Raises:
        ValueError: for a key that is missing, and a type that does not exist.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if key not in config:
                raise ValueError(f"curriculum learning: {key} is missing")
        kind = config["schedule_type"]
        if kind not in _KEYS:
            raise ValueError(f"curriculum learning: schedule_type {kind!r} is not one of {', '.join(_KEYS)}")
        self.custom_get_difficulty: Callable[[int], Any] | None = None
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
        }
        if kind == "custom":
            return
        given = config.get("schedule_config", {})
        for key in _KEYS[kind]:
            if key not in given:
                raise ValueError(f"curriculum learning: {kind} needs schedule_config.{key}")
        if kind == "fixed_discrete":
            if not given["max_step"] or len(given["difficulty"]) != len(given["max_step"]) + 1:
                raise ValueError(
                    "curriculum learning: schedule_config.difficulty needs one element more than max_step, "
                    f"got {given['difficulty']} and {given['max_step']}"
                )
        elif given["difficulty_step"] % _TENSOR_CORES:
            logger.warning(
                "curriculum learning: difficulty_step %s is no multiple of 8; sequences of such lengths "
                "compute slowly on tensor cores",
                given["difficulty_step"],
            )
        self.state["schedule_config"] = given

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Set the function of the step that a custom schedule calls."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        """Return the difficulty of a step. Raises RuntimeError for a custom schedule without a function."""
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise RuntimeError("curriculum learning: call set_custom_get_difficulty first")
            return self.custom_get_difficulty(global_steps)
        given = self.state["schedule_config"]
        if kind == "fixed_discrete":
            for difficulty, last in zip(given["difficulty"], given["max_step"], strict=False):
                if global_steps <= last:
                    return difficulty
            return given["difficulty"][-1]
        return self._on_a_curve(global_steps, given, 1 if kind == "fixed_linear" else given["root_degree"])

    def _on_a_curve(self, step: int, given: Mapping[str, Any], degree: float) -> Any:
        """Return the difficulty on the curve step ** (1 / degree), rounded down to a multiple of
        difficulty_step, but at least to the first one from min_difficulty on.
        """
        least = self.state["min_difficulty"]
        most = self.state["max_difficulty"]
        unit = given["difficulty_step"]
        share = (float(step) / given["total_curriculum_step"]) ** (1.0 / degree)
        found = math.floor(share * (most - least) + least)
        found -= found % unit
        found = max(found, -(-least // unit) * unit)
        return min(found, most)

    def update_difficulty(self, global_steps: int) -> Any:
        """Set and return the difficulty of a step; one that has reached its maximum stays."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]
