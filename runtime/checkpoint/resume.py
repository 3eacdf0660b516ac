"""Finds the folder that a run resumes from: ``zlaunch.resume_dir``."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from ..environment import Environment, read_environment
from ..log import warn
from .format.tensor_file import CheckpointError
from .trainer_checkpoints import is_output_dir, is_trainer_checkpoint, newest_complete, problem_of

_SEARCHES = {"../sweep.json": "the sweep", "../../tuned.json": "zlaunch tune"}
"""Files that describe a search, relative to the folder of one of its trials -> what started the trial."""


def resume_dir(default: str | None = None) -> str | None:
    """Return the folder that ``engine.load_checkpoint`` is to load from, or None for a new run.

    Under zlaunch: where this run had saved before it was restarted (``--max_restarts``), or before its SLURM
    job was requeued. ``default`` is for all other runs: a folder that is taken if it has a checkpoint.

    With a Hugging Face Trainer, ``trainer.train(resume_from_checkpoint=zlaunch.resume_dir(output_dir))``
    resumes from the newest complete ``checkpoint-N``. Newer incomplete ones cause a warning. After a restart,
    a ``checkpoint-N`` beyond the last one that this run has saved does not count.

    Raises:
        RuntimeError: This is a trial of ``zlaunch sweep`` or ``zlaunch tune``, and ``default`` has a
            checkpoint of another trial.
        CheckpointError: ``default`` is a Trainer's ``checkpoint-N``, and incomplete.
    """
    environment = read_environment()
    saved = None if environment.resume_dir is None else Path(environment.resume_dir).expanduser()
    given = None if default is None else Path(default).expanduser()
    if saved is not None and (is_trainer_checkpoint(saved) or is_output_dir(saved)):
        return _newest_of_trainer(saved, environment)
    if given is not None and is_trainer_checkpoint(given):
        return _complete(given, environment)
    if given is not None and is_output_dir(given):
        return _newest_of_trainer(given, environment)
    if environment.resume_dir is not None or default is None:
        return environment.resume_dir
    folder = os.path.expanduser(default)
    # Also without `latest`: load_checkpoint() then warns and names the checkpoints. With None, training would
    # restart without a word.
    tagged = os.path.join(glob.escape(folder), "*", "manifest.json")
    if not os.path.exists(os.path.join(folder, "latest")) and not glob.glob(tagged):
        return None
    _refuse_anothers(folder, environment.run_dir)
    return folder


def _complete(path: Path, environment: Environment) -> str:
    if (problem := problem_of(path)) is not None:
        raise CheckpointError(
            f"resume_dir: {path} is incomplete ({problem}): pass {path.parent} to resume from the newest "
            "complete checkpoint in it"
        )
    _refuse_anothers(str(path), environment.run_dir)
    return str(path)


def _newest_of_trainer(folder: Path, environment: Environment) -> str | None:
    chosen, problems = newest_complete(folder)
    if environment.rank == 0:
        instead = "a new run" if chosen is None else chosen.name
        for problem in problems:
            warn(f"resume_dir: {problem}: using {instead} instead")
    if chosen is None:
        return None
    _refuse_anothers(str(chosen), environment.run_dir)
    return str(chosen)


def _refuse_anothers(folder: str, run_dir: str | None) -> None:
    """Keep a trial from another one's checkpoint: it would train nothing, and report success."""
    if run_dir is None or (search := _search_of(run_dir)) is None:
        return
    if not os.path.realpath(folder).startswith(os.path.realpath(run_dir) + os.sep):
        trial = os.path.basename(run_dir)
        raise RuntimeError(
            f"resume_dir: {folder} has a checkpoint, but trial {trial} of {search} shares that folder with "
            "other trials: save under os.environ['ZLAUNCH_RUN_DIR'], a separate folder per trial. To start "
            "all trials from one checkpoint, call engine.load_checkpoint on its folder"
        )


def _search_of(run_dir: str) -> str | None:
    """Return what has started a run as one of its trials, or None."""
    run = os.path.realpath(run_dir)
    found = (search for file, search in _SEARCHES.items() if os.path.exists(os.path.join(run, file)))
    return next(found, None)
