"""Lists the features of the matrix: each a function that trains something, under a group and a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tests.matrix.sides import Side
from tests.matrix.train import train

STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Feature:
    """Holds what the harness needs to run one feature and to judge it."""

    group: str
    name: str
    run: Callable[[Side], Any]
    stages: tuple[int, ...] = STAGES
    refuses: Mapping[int, str] = field(default_factory=dict)
    """Stage -> what the error must say, where the wanted behaviour is a refusal."""
    may_refuse: str = ""
    """What an error must say that is as good as the same values; empty where only those will do."""
    tolerance: float = TOLERANCE
    seconds: float = 60.0
    """How long one stage may take before it counts as hanging."""


FEATURES: dict[str, Feature] = {}
"""``group/name`` -> feature."""


def feature(
    group: str,
    name: str,
    *,
    stages: tuple[int, ...] = STAGES,
    refuses: str | Mapping[int, str] | None = None,
    may_refuse: str = "",
    tolerance: float = TOLERANCE,
    seconds: float = 60.0,
) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    """Register a function of a :class:`Side`, run once by plain torch and once under each stage.

    ``refuses`` is a regular expression that the error must match at every stage, or one for each stage;
    ``may_refuse`` one that an error may match.
    """
    wanted = dict.fromkeys(stages, refuses) if isinstance(refuses, str) else dict(refuses or {})

    def register(run: Callable[[Side], Any]) -> Callable[[Side], Any]:
        key = f"{group}/{name}"
        if key in FEATURES:
            raise ValueError(f"two features are called {key}")
        FEATURES[key] = Feature(group, name, run, stages, wanted, may_refuse, tolerance, seconds)
        return run

    return register


def model(
    group: str,
    name: str,
    *,
    stages: tuple[int, ...] = STAGES,
    refuses: str | Mapping[int, str] | None = None,
    may_refuse: str = "",
    tolerance: float = TOLERANCE,
    seconds: float = 60.0,
    **training: Any,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a function that builds a model, trained by the usual loop with ``training`` as its options."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        feature(
            group,
            name,
            stages=stages,
            refuses=refuses,
            may_refuse=may_refuse,
            tolerance=tolerance,
            seconds=seconds,
        )(lambda side: train(side, build(), **training))
        return build

    return register


def load_features() -> dict[str, Feature]:
    """Import every ``cases_*.py`` beside this file and give back all features, in the order of the files."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"tests.matrix.{path.stem}")
    return FEATURES
