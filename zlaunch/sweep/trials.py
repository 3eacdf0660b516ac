"""Hold the trials of a sweep: their files, what they have reported, and the table of results."""

from __future__ import annotations

import copy
import csv
import fcntl
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import make_folder
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_files import EventFile
from zlaunch.sweep.space import EarlyStopping, SweepSpace, Values

# -- trials -----------------------------------------------------------------------------------------


CONFIG = "config.json"
"""File in a trial's folder: the script's config with the trial's values."""
_STOPPED = "stopped_early"
"""File in a trial's folder that says that the sweep, and nobody else, has stopped it."""


@dataclass(slots=True)
class SweepTrial:
    """Holds one trial: a run with its values."""

    number: int
    values: Values
    folder: Path
    metric: str
    standing: Callable[[Path], str]
    """Tells how the run with a folder stands: `new`, `queued`, `running`, or `ended` and its exit code, or a
    word where there is none.
    """
    step: float = 0.0
    """The last step that rank 0 has reported; where it reports none, how often it has reported the metric."""
    last: float | None = None
    """The last metric that it has reported."""
    reported: set[str] = field(default_factory=set)
    """The names of all that it has reported."""
    _events: EventFile | None = None
    _tells_steps: bool = False

    def read(self) -> list[tuple[float, float]]:
        """Read what rank 0 has reported since the last call: step and metric, in that order."""
        found = []
        if self._events is None:
            self._events = EventFile(self.folder / "events.jsonl")
        for event in self._events.read():
            values = event.get("values")
            if event.get("type") != "metrics" or event.get("rank") != 0 or not isinstance(values, dict):
                continue
            step = values.get("step", values.get("engine_step"))
            value = values.get(self.metric)
            self.reported.update(values)
            if isinstance(step, (int, float)):
                self.step = float(step)
                self._tells_steps = True
            if value is not None:
                self.step += 0 if self._tells_steps else 1
                self.last = _number(value)
                found.append((self.step, self.last))
        return found

    def stop(self) -> None:
        """Note that it is stopped early."""
        (self.folder / _STOPPED).touch()

    @property
    def is_stopped(self) -> bool:
        """Tell whether the sweep has stopped it."""
        return (self.folder / _STOPPED).exists()

    @property
    def is_begun(self) -> bool:
        """Tell whether it has been put into the queue."""
        return self.standing(self.folder) != "new"

    @property
    def state(self) -> str:
        """Return `new`, `queued`, `running`, `done`, `stopped early`, `failed` with its exit code, or `gone`
        where its folder is.
        """
        state, _, code = self.standing(self.folder).partition(" ")
        if state == "queued":
            return state
        if not self.folder.exists():
            return "gone"
        if state != "ended":
            return state
        if code == "0":
            return "done"
        return "stopped early" if self.is_stopped else f"failed {code}"

    @property
    def has_ended(self) -> bool:
        """Tell whether nothing more will come of it."""
        return self.state.startswith(("done", "failed", "stopped", "gone"))


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # a script may report "nan" as text, or anything
    except (TypeError, ValueError):
        return float("nan")


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read: a command line may hold secrets. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(os.fsencode(text))


def hold(folder: Path) -> int:
    """Make a sweep's folder, and keep other sweeps out of it while the returned descriptor is open.

    Raises LaunchError.
    """
    try:
        make_folder(folder)
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise LaunchError(f"{folder}: another `zlaunch sweep` is using it") from None
    except OSError as error:
        raise LaunchError(f"{error.filename or folder}: {error.strerror}") from None
    return fd


def digits_of(trials: Sequence[object]) -> int:
    """Return how many digits the folders of a sweep's trials have."""
    return max(3, len(str(len(trials))))


def open_trials(
    folder: Path,
    space: SweepSpace,
    command: Sequence[str],
    standing: Callable[[Path], str],
    queue: str = "local",
    *,
    compared: Callable[[Sequence[str]], object] = tuple,
) -> list[SweepTrial]:
    """Make a sweep's folder, or resume the sweep in it. Raises LaunchError if it has another sweep.

    Args:
        compared: returns what must be the same in the command lines of one sweep.
    """
    about = json.loads(json.dumps({"queue": queue, "command": list(command), "space": asdict(space)}))
    path = folder / "sweep.json"
    try:
        make_folder(folder)
        if not _is_same(run_folder.read_json(path), about, compared):
            if any(folder.glob("*/launcher.json")) or any(standing(p) != "new" for p in folder.glob("*/")):
                raise LaunchError(
                    f"{folder} contains the runs of another sweep or command: use another --dir"
                )
            write_private(path, json.dumps(about, indent=1) + "\n")
        digits = digits_of(space.trials)
        trials = []
        for number, values in enumerate(space.trials, start=1):
            own = (folder / f"{number:0{digits}d}").resolve()
            make_folder(own)
            trials.append(SweepTrial(number, dict(values), own, space.metric, standing))
    except OSError as error:
        raise LaunchError(f"{error.filename or folder}: {error.strerror}") from None
    return trials


def _is_same(
    known: Mapping[str, Any], about: Mapping[str, Any], compared: Callable[[Sequence[str]], object]
) -> bool:
    """Return whether two contents of sweep.json are of one sweep."""
    if known == about:
        return True
    command = known.get("command")
    if {**known, "command": None} != {**about, "command": None} or not isinstance(command, list):
        return False
    return compared(command) == compared(about["command"])


def read_trials(folder: Path, standing: Callable[[Path], str]) -> tuple[list[SweepTrial], str]:
    """Return the trials of a sweep that somebody else runs, and its goal. Raises LaunchError."""
    path = folder / "sweep.json"
    try:
        space = run_folder.read_json(path)["space"]
        given = space["trials"]
        metric = str(space["metric"])
        goal = str(space["goal"])
        digits = digits_of(given)
        trials = [
            SweepTrial(number, dict(values), (folder / f"{number:0{digits}d}").resolve(), metric, standing)
            for number, values in enumerate(given, start=1)
        ]
    except (KeyError, TypeError, ValueError):
        raise LaunchError(f"{path} cannot be read") from None
    return trials, goal


def with_values(config: Mapping[str, Any], values: Mapping[str, object]) -> dict[str, Any]:
    """Return a config with the values of dotted keys. Raises LaunchError where one leads through a value."""
    changed = copy.deepcopy(dict(config))
    for name, value in values.items():
        *above, last = name.split(".")
        section = changed
        for key in above:
            inner = section.setdefault(key, {})
            if not isinstance(inner, dict):
                raise LaunchError(f"parameter {name}: {key} is {inner!r} in the config, not a section")
            section = inner
        section[last] = value
    return changed


def as_arguments(values: Mapping[str, object]) -> list[str]:
    """Return values as a script's arguments: `--name=value`; `--name` for true, none for false and null."""
    words = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif value is not False and value is not None:
            words.append(f"{name}={value}")
    return words


def ranked(trials: Sequence[SweepTrial], goal: str) -> list[SweepTrial]:
    """Return the trials, the best first: those that came to their end, then the others, then those without
    a metric.
    """
    sign = 1.0 if goal == "min" else -1.0

    def key(trial: SweepTrial) -> tuple[bool, bool, float]:
        last = trial.last
        usable = last is not None and last == last
        return not usable, trial.state != "done", sign * last if last is not None and usable else 0.0

    return sorted(trials, key=key)


def write_results(folder: Path, trials: Sequence[SweepTrial]) -> None:
    """Write `results.csv`, one row a trial. Raises LaunchError."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    path = folder / "results.csv"
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        with temporary.open("w", newline="") as file:
            rows = csv.writer(file)
            metric = trials[0].metric if trials else "metric"
            rows.writerow(["trial", "state", *names, metric, "step", "folder"])
            for trial in trials:
                values = [trial.values.get(name) for name in names]
                shown = "" if trial.last is None else repr(trial.last)
                rows.writerow(
                    [
                        trial.number,
                        trial.state,
                        *values,
                        shown,
                        f"{trial.step:g}",
                        os.path.relpath(trial.folder),
                    ]
                )
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LaunchError(f"{path}: {error.strerror}") from None


# -- stopping ---------------------------------------------------------------------------------------
#
# Decide which trials of a sweep are not worth going on with: asynchronous successive halving. Pure.
#
# L. Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), in the form that stops trials
# and
# never starts one again: at min_steps, and each time at `factor` times as many, a trial goes on only while
# it
# is among the best 1/factor of those that have come there.


class SuccessiveHalving:
    """Compares trials at the last rung that each has come to."""

    def __init__(self, rules: EarlyStopping, goal: str) -> None:
        """Take the rules; `goal` is `min` or `max`."""
        self._rules = rules
        self._sign = 1.0 if goal == "min" else -1.0
        self._rungs: dict[int, dict[int, float]] = defaultdict(dict)
        """Steps of a rung -> trial -> its metric there, the smaller the better."""

    def goes_on(self, trial: int, reports: Iterable[tuple[float, float]]) -> bool:
        """Take a trial's new reports, step and metric, in their order; tell whether it goes on.

        At a rung its first report there counts.
        """
        for step, value in reports:
            rung = self._rules.min_steps
            while rung <= step < math.inf:
                self._rungs[rung].setdefault(trial, self._sign * value if math.isfinite(value) else math.inf)
                rung *= self._rules.factor
        last = max((rung for rung, known in self._rungs.items() if trial in known), default=None)
        if last is None:
            return True
        known = self._rungs[last]
        better = sum(other < known[trial] for other in known.values())
        return math.isfinite(known[trial]) and better < math.ceil(len(known) / self._rules.factor)
