"""Choose which variants are tried, and in which order. Pure: a function measures each."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import make_folder
from zlaunch.tuning.variants import DEVICE_PLACEMENTS, HOST_PLACEMENTS, Placement, Variant

# -- search -----------------------------------------------------------------------------------------


OK = "ok"
OUT_OF_MEMORY = "out of memory"
NO_STEP = "ended without a step"
"""Begins the verdict of a run that trained nothing; the reason follows."""
_BUCKETS = (5_000_000, 50_000_000)
_GAIN = 1.02
"""Says by which factor something has to be faster than what was tried before it."""
_BEST = 2
"""Placements whose micro-batch is tuned."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds what came of one run."""

    variant: Variant
    verdict: str
    """``ok``, ``out of memory``, or why there is no speed, in words."""
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    memory_gb: float = 0.0
    """Gives the device memory of the rank with the most."""
    host_gb: float = 0.0
    seconds: float = 0.0
    """Counts the seconds of the whole run."""
    samples_per_s: float = 0.0
    mfu: float = 0.0
    """Gives the share that the run reached of what matrix multiplications reach there; 0: not known."""

    def but_failed(self, why: str) -> Trial:
        """Return the trial without a speed."""
        return replace(self, verdict=f"failed: {why}", steps_per_s=0.0, tokens_per_s=0.0)

    def beats(self, other: Trial | None) -> bool:
        """Tell whether it is faster than another by more than chance: a change has to earn its place."""
        return self.is_ok and (other is None or self.steps_per_s > _GAIN * other.steps_per_s)

    @property
    def is_ok(self) -> bool:
        """Tell whether it has a speed."""
        return self.verdict == OK

    @property
    def without_a_step(self) -> str | None:
        """Why the run ended with exit code 0 and without a step; None if it did not."""
        if not self.verdict.startswith(NO_STEP):
            return None
        return self.verdict.removeprefix(NO_STEP).removeprefix(": ")


@dataclass(frozen=True, slots=True)
class Space:
    """Holds what may be tried."""

    placement: Placement | None
    """The user's own; None where it is another than those that are tried."""
    micro: int | None
    """The user's own micro-batch; None where it cannot be changed."""
    micros: Sequence[int] = ()
    world_size: int = 1

    def placements(self, *, on_host: bool) -> list[Placement]:
        """Return the placements, the fastest first. One rank has nothing to shard at stages 1 and 2."""
        known = HOST_PLACEMENTS if on_host else DEVICE_PLACEMENTS
        return [p for p in known if self.world_size > 1 or p.is_offloaded or p.stage in (0, 3)]


def search(space: Space, measure: Callable[[Variant], Trial]) -> Trial | None:
    """Return the fastest trial, the user's own config among them; None where none has a speed."""
    trials = _Trials(space, measure)
    trials.take(Variant())
    for placement in space.placements(on_host=False):
        trials.take(Variant(placement))
    if trials.best is None or any(trial.verdict == OUT_OF_MEMORY for trial in trials.known):
        for placement in space.placements(on_host=True):
            trials.take(Variant(placement))
    if trials.best is None:
        _shrink(space, trials)
    else:
        _grow(space, trials)
    if trials.best is not None:
        best = trials.best.variant
        for bucket in _BUCKETS:
            trials.take(best.but(bucket=bucket))
        chosen = best.placement or space.placement
        if chosen is not None and chosen.stage == 3:
            trials.take(trials.best.variant.but(prefetches=False))
    return trials.best


def _shrink(space: Space, trials: _Trials) -> None:
    """Try smaller micro-batches with what takes least memory, where nothing fits with the user's own."""
    smaller = [micro for micro in reversed(space.micros) if space.micro is not None and micro < space.micro]
    for micro in smaller:
        for placement in [*space.placements(on_host=False)[-1:], *space.placements(on_host=True)]:
            trials.take(Variant(placement, micro))
        if trials.best is not None:
            return


def _grow(space: Space, trials: _Trials) -> None:
    """Try larger micro-batches with the fastest placements. Where one does not fit, what takes less memory
    may be faster in the end.
    """
    larger = [micro for micro in space.micros if space.micro is not None and micro > space.micro]
    ranked = sorted((t for t in trials.known if t.is_ok), key=lambda t: t.steps_per_s, reverse=True)
    missed = [_climb(trial.variant.placement, larger, trial, trials) for trial in ranked[:_BEST]]
    start = min((micro for micro in missed if micro is not None), default=None)
    if start is None:
        return
    for placement in [*space.placements(on_host=False), *space.placements(on_host=True)]:
        first = trials.take(Variant(placement, start))
        if first is not None and first.is_ok:
            _climb(placement, [micro for micro in larger if micro > start], first, trials)


def _climb(placement: Placement | None, micros: Sequence[int], before: Trial, trials: _Trials) -> int | None:
    """Take larger micro-batches while they are faster; return the first that does not fit, or None."""
    for micro in micros:
        trial = trials.take(Variant(placement, micro))
        if trial is None or trial.verdict == OUT_OF_MEMORY:
            return micro
        if not trial.is_ok or trial.steps_per_s < _GAIN * before.steps_per_s:
            return None
        before = trial
    return None


class _Trials:
    """Measures each variant once, and none of which it is known that it does not fit."""

    def __init__(self, space: Space, measure: Callable[[Variant], Trial]) -> None:
        self._space = space
        self._measure = measure
        self._seen: dict[Variant, Trial] = {}
        self.best: Trial | None = None

    @property
    def known(self) -> list[Trial]:
        """Return all trials, in their order."""
        return list(self._seen.values())

    def take(self, variant: Variant) -> Trial | None:
        """Return the trial of a variant; None where it cannot fit."""
        variant = self._plain(variant)
        if variant in self._seen:
            return self._seen[variant]
        if any(self._is_larger(variant, t.variant) for t in self.known if t.verdict == OUT_OF_MEMORY):
            return None
        trial = self._seen[variant] = self._measure(variant)
        if trial.beats(self.best):
            self.best = trial
        return trial

    def _plain(self, variant: Variant) -> Variant:
        """Leave out what is the user's own value already, so that one config has one variant."""
        if variant.placement is not None and variant.placement == self._space.placement:
            variant = variant.but(placement=None)
        if variant.micro_batch is not None and variant.micro_batch == self._space.micro:
            variant = variant.but(micro_batch=None)
        return variant

    def _is_larger(self, variant: Variant, other: Variant) -> bool:
        """Tell whether a variant takes at least the memory of one that did not fit."""
        mine = variant.placement or self._space.placement
        theirs = other.placement or self._space.placement
        if mine is None or theirs is None or mine.is_offloaded or theirs.is_offloaded:
            comparable = mine is not None and mine == theirs
        else:
            comparable = mine.stage <= theirs.stage
        micros = (variant.micro_batch or self._space.micro or 0, other.micro_batch or self._space.micro or 0)
        return comparable and micros[0] >= micros[1]


# -- results ----------------------------------------------------------------------------------------
#
# Keep what each run of a tuning has shown, so that it can go on where it was ended.


_COLUMNS = (
    *("number", "variant", "verdict", "steps_per_s", "tokens_per_s", "memory_gb", "host_gb", "seconds"),
    *("samples_per_s", "mfu", "changes"),
)


class TuningResults:
    """Holds the trials of one tuning, in ``results.csv`` of its folder."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Read what is there. ``about``: what is tuned. Raises LaunchError where that was something else."""
        self.folder = folder
        self.trials: list[Trial] = []
        description = folder / "tuned.json"
        try:
            make_folder(folder)
            if description.exists() and json.loads(description.read_text()) != about:
                raise LaunchError(
                    f"{folder} contains the results of another command or config: put another --dir "
                    "before the script, or remove the folder"
                )
            description.write_text(json.dumps(about, indent=1) + "\n")
            if self._path.exists():
                with self._path.open(newline="") as file:
                    self.trials = [_read_row(row) for row in csv.DictReader(file)]
            else:
                self._append(_COLUMNS)
        except OSError as error:
            raise LaunchError(f"{folder}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise LaunchError(f"{folder} cannot be read: remove it to start over") from None

    @property
    def _path(self) -> Path:
        return self.folder / "results.csv"

    def known(self, variant: Variant) -> Trial | None:
        """Return the trial of a variant, if it has been made."""
        return next((trial for trial in self.trials if trial.variant == variant), None)

    def add(self, trial: Trial) -> None:
        """Keep a trial. Raises LaunchError where it cannot be written."""
        self.trials.append(trial)
        values = asdict(trial)
        row = [len(self.trials), trial.variant.name, *(values[name] for name in _COLUMNS[2:-1])]
        try:
            self._append([*row, json.dumps(values["variant"])])
        except OSError as error:
            raise LaunchError(f"{self._path}: {error.strerror}") from None

    def _append(self, row: Sequence[object]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(row)


def _read_row(row: dict[str, str]) -> Trial:
    changes = json.loads(row["changes"])
    if changes["placement"] is not None:
        changes["placement"] = Placement(**changes["placement"])
    numbers = [float(row[name]) for name in _COLUMNS[3:-1]]
    return Trial(Variant(**changes), row["verdict"], *numbers)
