"""Keep what each run of a tuning has shown, so that it can go on where it was ended."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import make_folder
from zlaunch.tuning.search import Trial
from zlaunch.tuning.variants import Placement, Variant

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
