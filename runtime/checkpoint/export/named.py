"""Opens the checkpoint that a user names, also in the output_dir of a Hugging Face Trainer.

Part of the stand-alone script (``script.py``): needs torch alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..format.manifest import LATEST, Checkpoint, candidates, find, looks_whole, newest_whole, of_trainer
from ..format.tensor_file import CheckpointError
from ..trainer_checkpoints import incomplete

_MOST_NAMED = 5


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Checkpoint:
    """Open the checkpoint that ``tag`` means, as :func:`find`. In the output_dir of a Hugging Face Trainer,
    ``tag`` is the name of a ``checkpoint-N``; None takes the newest complete one and prints which. Raises
    CheckpointError.
    """
    folder = Path(folder)
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder")
    if inner := of_trainer(folder):
        return Checkpoint(inner[_choose_of_trainer(folder, inner, tag)])
    path = find(folder, tag)
    if path is None and tag == "auto":
        raise CheckpointError(f"{folder}: has no complete checkpoint")
    if path is None:
        names = [other.name for other in candidates(folder)]
        advised = f"; --tag takes one of {_listed(names)}" if names else ""
        raise CheckpointError(f"{folder}: no checkpoint found (no file {LATEST!r}){advised}")
    return Checkpoint(path)


def _choose_of_trainer(folder: Path, inner: Mapping[str, Path], tag: str | None) -> str:
    """Return the key of ``inner`` that ``tag`` means; without a tag, the newest complete one, and the newest
    if none is complete. Raises CheckpointError.
    """
    names = list(inner)
    if tag is None:
        problems = {name: incomplete(path) for name, path in inner.items()}
        # The newest, even if none is complete: weights may be whole where the rest of a Trainer's save is
        # missing.
        chosen = next((name for name in names if problems[name] is None), names[0])
        for name in names[: names.index(chosen)]:
            print(
                f"zlaunch: warning: {folder / name} is incomplete ({problems[name]}): using {chosen} instead",
                file=sys.stderr,
                flush=True,
            )
        left = [name for name in names if name != chosen]
        others = f"; others: {_listed(left)}" if left else ""
        best = _best_of_trainer(folder / chosen)
        told = f". The Trainer's best is {best}: --tag {best}" if best in left else ""
        print(f"zlaunch: {folder}: using {chosen}{others}{told}", file=sys.stderr, flush=True)
        return chosen
    if tag == "auto":
        for name, path in inner.items():
            if incomplete(path) is not None:
                continue
            is_numbered = path.parent != folder
            is_whole = newest_whole(folder / name)[0] is not None if is_numbered else looks_whole(path)
            if is_whole:
                return name
        raise CheckpointError(f"{folder}: has no complete checkpoint")
    if tag not in inner:
        raise CheckpointError(f"{folder}: has no checkpoint {tag!r}: use one of {_listed(names)}")
    return tag


def _best_of_trainer(path: Path) -> str | None:
    """Return the name of the best checkpoint so far, as a Trainer's ``checkpoint-N`` knows it."""
    try:
        best = json.loads((path / "trainer_state.json").read_text())["best_model_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):  # its weights are what counts here
        return None
    return Path(best).name if isinstance(best, str) else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
