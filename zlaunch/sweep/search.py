"""Run a sweep: put its trials into a queue, and follow them to their end."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.plan.checks import config_arguments, replace_config
from zlaunch.queue.submit import SubmitRequest
from zlaunch.runtime.config import ConfigError, load
from zlaunch.slurm.environment import SlurmError
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_files import EventFile
from zlaunch.sweep.queues import TrialQueue
from zlaunch.sweep.space import SweepSpace
from zlaunch.sweep.trials import (
    CONFIG,
    SuccessiveHalving,
    SweepTrial,
    as_arguments,
    with_values,
    write_results,
)
from zlaunch.view.progress import RunProgress

_POLL_S = 1.0


def config_of(command: Sequence[str], space: SweepSpace) -> str | None:
    """Return the config whose keys the sweep changes, as it is named; None if it changes none.

    Raises LaunchError.
    """
    keys = [name for name in space.trials[0] if not name.startswith("--")]
    if not keys:
        return None
    configs = {value for _, value, _ in config_arguments(command[1:])}
    if len(configs) != 1:
        raise LaunchError(
            f"parameter {keys[0]} is a config key, but {command[0]} gets no config: pass "
            "--config, --deepspeed_config or --deepspeed with a .json, .yaml or .yml file"
        )
    return configs.pop()


class SweepSearch:
    """Puts trials into the queue, follows them, and stops those that are behind."""

    def __init__(
        self,
        folder: Path,
        space: SweepSpace,
        trials: Sequence[SweepTrial],
        queue: TrialQueue,
        warn: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.space = space
        self.trials = trials
        self.queue = queue
        self.warn = warn
        self.has_warned = self.has_failed_to_stop = False
        self.known = 0
        """Trials that were in the queue before."""
        rules = space.early_stopping
        self.halving = None if rules is None else SuccessiveHalving(rules, space.goal)

    def begin(self, request: SubmitRequest, config: str | None) -> str:
        """Put every trial that is not there yet into the queue. Return what the queue tells the user.

        Raises LaunchError, and what the queue's checks raise.
        """
        self.queue.look()
        path = None if config is None else os.path.join(request.given["workdir"] or "", config)
        raw = None if path is None else load_config(path, self.space, self.warn)
        new = {
            trial.number: request_of(request, trial, config, raw)
            for trial in self.trials
            if not trial.is_begun
        }
        for each in new.values():  # before anything is queued
            self.queue.check(each)
        said = self.queue.submit(request, new)
        self.known = len(self.trials) - len(new)
        return said

    def follow(self) -> Iterator[SweepTrial]:
        """Yield each trial when it has ended; stop those that are behind."""
        left = list(self.trials)
        while True:
            self.queue.look()
            before = len(left)
            for trial in list(left):
                state = trial.state
                if state == "queued":
                    continue
                # Asked first: what comes afterwards is still read.
                has_ended = trial.has_ended or state == "new"
                new = trial.read()
                is_behind = self.halving is not None and not self.halving.goes_on(trial.number, new)
                if has_ended:
                    left.remove(trial)
                    yield trial
                    self._miss_metric(trial)
                elif is_behind and not trial.is_stopped:
                    self._stop(trial)
            if len(left) < before:
                write_results(self.folder, self.trials)
            if not left:
                return
            time.sleep(_POLL_S)

    def _stop(self, trial: SweepTrial) -> None:
        """Stop a trial that is behind; where SLURM does not answer, the next look tries again."""
        try:
            self.queue.cancel(trial.folder)
        except SlurmError as error:
            if not self.has_failed_to_stop:
                self.warn(f"{error}; it is tried again")
            self.has_failed_to_stop = True
            return
        trial.stop()

    def _miss_metric(self, trial: SweepTrial) -> None:
        """Say it once when a trial has come to its end without the metric."""
        if trial.last is None and trial.state == "done" and not self.has_warned:
            self.has_warned = True
            metric = self.space.metric
            reported = f"; it has reported {', '.join(sorted(trial.reported))}" if trial.reported else ""
            text = f"trial {trial.number} has not reported {metric!r}, by which trials are compared{reported}"
            self.warn(text)


def request_of(
    request: SubmitRequest, trial: SweepTrial, config: str | None, raw: Mapping[str, Any] | None
) -> SubmitRequest:
    """Return the command line of a trial; write its config."""
    command = list(request.command)
    keys = {name: value for name, value in trial.values.items() if not name.startswith("--")}
    if config is not None and raw is not None:
        path = trial.folder / CONFIG
        path.write_text(json.dumps(with_values(raw, keys), indent=1) + "\n")
        command = replace_config(command, config, str(path))
    command += as_arguments({name: value for name, value in trial.values.items() if name not in keys})
    return request._replace(command=tuple(command), given={**request.given, "run_dir": str(trial.folder)})


def load_config(path: str, space: SweepSpace, warn: Callable[[str], None]) -> dict[str, Any]:
    """Read the config whose keys a sweep changes; warn of those that only the script can know.

    Raises LaunchError.
    """
    try:
        raw = load(path).raw
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    keys = {name: value for name, value in space.trials[0].items() if not name.startswith("--")}
    try:
        warnings = load(with_values(raw, keys)).warnings
    except ConfigError:  # said of the trial's own
        return raw
    for name in keys:
        if any(f"{name}: unknown key" in warning for warning in warnings):
            text = f"{name} is no key of a config that zlaunch knows; an argument of the script is --{name}"
            warn(text)
    return raw


def first_failure(trial: SweepTrial) -> str:
    """Return the first failure in a trial's events; without one, where its logs are."""
    failures: list[str] = []
    record = run_folder.read(trial.folder)
    progress = RunProgress() if record is None else RunProgress(record.shown)
    with contextlib.suppress(OSError):
        failures = progress.take_all(EventFile(trial.folder / "events.jsonl").read()).failures
    return failures[0] if failures else f"{trial.state}, see `zlaunch logs {trial.folder}` and its files"
