"""Runs a group of features in worker processes, and again without what crashed, until each has a result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.limits import MATRIX_LIMIT_S
from tests.matrix.registry import Feature
from tests.matrix.worker import work
from tests.runtime.workers import WorkerError, run_workers

WORLD = 2

Results = dict[str, dict[int, str]]
"""Feature -> stage -> what is wrong there, empty for nothing."""


def run_group(features: Sequence[tuple[str, Feature]]) -> Results:
    """Run all features at their stages in one set of processes, or as many as crashes make necessary."""
    todo = [(key, stage) for key, feature in features for stage in feature.stages]
    results: Results = {key: {} for key, _ in features}
    while todo:
        with tempfile.TemporaryDirectory(prefix="zlaunch-matrix-") as name:
            folder, trouble = Path(name), ""
            try:
                run_workers(work, WORLD, todo, name, limit_s=MATRIX_LIMIT_S)
            except WorkerError as error:
                trouble = str(error)
            _collect(folder, todo, results, trouble)
        todo = [(key, stage) for key, stage in todo if stage not in results[key]]
    return results


def _collect(folder: Path, todo: list[tuple[str, int]], results: Results, trouble: str) -> None:
    """Take over what the workers wrote; a stage that was begun and has no result is a failure."""
    running = [path.read_text() for path in folder.glob("now.*")]
    for key, stage in todo:
        name = f"{key}@{stage}".replace("/", "_")
        paths = [folder / f"{name}.{rank}" for rank in range(WORLD)]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
        wrong = [f"rank {i}: {one['wrong']}" for i, one in enumerate(found) if one["wrong"]]
        if len(found) == WORLD:
            results[key][stage] = "\n".join(wrong)
        elif f"{key}@{stage}" in running:
            results[key][stage] = "\n".join(["crashed or hung: " + trouble, *wrong, _stacks(folder)])
    if not any(path.exists() for path in folder.glob("now.*")):
        for key, stage in todo:  # not even the first was begun
            results[key][stage] = trouble or "the workers ended without a word"


def _stacks(folder: Path) -> str:
    """Give the ends of the stacks that a deadline had the workers write."""
    return "\n".join(f"{path.name}:\n{path.read_text()[:3000]}" for path in sorted(folder.glob("stacks.*")))


def describe(results: dict[int, str]) -> str:
    """Give what is wrong, stage by stage; equal messages once."""
    stages: dict[str, list[int]] = {}
    for stage, message in results.items():
        if message:
            stages.setdefault(message, []).append(stage)
    return "\n".join(f"stage {', '.join(map(str, at))}: {message}" for message, at in stages.items())
