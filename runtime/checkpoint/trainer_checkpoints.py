"""Finds the checkpoint from which a Hugging Face Trainer can resume.

Note [Complete]
The Trainer writes ``OUTPUT_DIR/checkpoint-N`` file by file: the model, the engine's checkpoint (or the
optimizer), the random states of all ranks, and ``trainer_state.json`` last. A process that is killed then
leaves a folder from which the Trainer cannot resume: each restart would fail in the same way.
A folder is complete if it has the last file, what comes before it, and if each file has its end: torch.save
writes an archive whose index is at the end, and safetensors files name their length at the start. Weights are
needed where no engine's checkpoint has them.

Part of the stand-alone script (``script.py``): needs torch alone.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from .format.manifest import LATEST, TRAINER_FOLDER, candidates, find, looks_whole
from .format.tensor_file import CheckpointError

_STATE = "trainer_state.json"
_TRACES = ("training_args.bin", _STATE)
"""Files that only a Trainer writes; the first one early, the other one last."""
_ZIPS = re.compile(
    r"(rng_state|optimizer|scheduler|scaler|training_args|pytorch_model|adapter_model).*\.(pt|pth|bin)"
)
"""Files that the Trainer writes with torch.save."""
_OF_WEIGHTS = re.compile(
    r"((adapter_)?model\.safetensors|(pytorch|adapter)_model\.bin|pytorch_model_fsdp\.bin)"
)
_WEIGHTS_IN_FOLDERS = ("pytorch_model_fsdp_*/", "*/adapter_model.*")
_INDEX = ".index.json"
"""Ends the name of the file that lists the files of weights in several ones."""
_BAD_JSON = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors from reading damaged JSON, or JSON of another structure."""


def is_output_dir(folder: Path) -> bool:
    """Tell whether ``folder`` has a Trainer's ``checkpoint-N`` in it."""
    return any(is_trainer_checkpoint(path) for path in folder.glob("checkpoint-*"))


def is_trainer_checkpoint(folder: Path) -> bool:
    """Tell whether ``folder`` is a Trainer's ``checkpoint-N``, complete or not."""
    named = TRAINER_FOLDER.fullmatch(folder.name) is not None
    return named and any((folder / name).exists() for name in _TRACES)


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the complete ``checkpoint-N`` with the largest N, and say what is wrong with newer ones.

    Args:
        folder: The Trainer's output_dir, or a ``checkpoint-K`` in it: then only N <= K count. Larger ones are
            of another run, which has used the same output_dir.
    """
    problems: list[str] = []
    output_dir, last = (folder.parent, _step(folder)) if is_trainer_checkpoint(folder) else (folder, None)
    found = [path for path in output_dir.glob("checkpoint-*") if is_trainer_checkpoint(path)]
    for path in sorted(found, key=_step, reverse=True):
        if last is not None and _step(path) > last:
            continue
        problem = problem_of(path)
        if problem is None:
            return path, problems
        problems.append(f"{path}: is incomplete ({problem})")
    return None, problems


def incomplete(checkpoint: Path) -> str | None:
    """Say what keeps the Trainer from resuming from the ``checkpoint-N`` that this engine's checkpoint lies
    in; None for a complete one, and for a checkpoint that is no Trainer's.
    """
    folder = checkpoint.absolute().parent
    return problem_of(folder) if is_trainer_checkpoint(folder) else None


def without_checkpoint(output_dir: Path) -> dict[str, str]:
    """Return what is missing in each ``checkpoint-N`` that has no whole checkpoint of the engine, because a
    save was interrupted; the largest N first.
    """
    found = [path for path in output_dir.glob("checkpoint-*") if TRAINER_FOLDER.fullmatch(path.name)]
    # A save begins with a hidden folder: see Note [Atomic saves] in format/commit.py.
    bare = [path for path in found if not candidates(path) and any(path.glob(".global_step*"))]
    problems = {path.name: problem_of(path) for path in sorted(bare, key=_step, reverse=True)}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def problem_of(path: Path) -> str | None:
    """Say what keeps the Trainer from resuming here; None for a complete folder. See Note [Complete]."""
    try:
        names = sorted(file.name for file in path.iterdir() if file.is_file())
    except OSError as error:
        return str(error)
    # The Trainer writes it last: without it, the save was interrupted.
    if _STATE not in names:
        return f"no {_STATE}"
    problems = (_problem_of_file(path / name) for name in names)
    if (damage := next((problem for problem in problems if problem is not None), None)) is not None:
        return damage
    if not any(re.fullmatch(r"rng_state(_\d+)?\.pth", name) for name in names):
        return "no rng_state: saved with save_only_model, or interrupted"
    try:
        inner = find(path) if LATEST in names else None
    except CheckpointError as error:
        return str(error)
    if inner is not None:
        return None if looks_whole(inner) else f"{path.name}/{inner.name} is damaged"
    # Either an engine's checkpoint without `latest`, which load_checkpoint() would not find, or no optimizer
    # state.
    if candidates(path) or not list(path.glob("optimizer*")):
        return f"no optimizer state, and no file {LATEST}"
    return _problem_of_weights(path, names)


def _problem_of_weights(path: Path, names: Sequence[str]) -> str | None:
    """Say which weights are missing where the Trainer, without an engine, loads them itself."""
    indices = [name for name in names if name.endswith(_INDEX)]
    for index in indices:
        try:
            shards = sorted(set(json.loads((path / index).read_bytes())["weight_map"].values()))
            missing = next((shard for shard in shards if not (path / shard).is_file()), None)
        except _BAD_JSON:
            return f"{index} is damaged"
        if missing is not None:
            return f"no {missing}, which {index} names"
    is_there = indices or any(_OF_WEIGHTS.fullmatch(name) for name in names)
    if not is_there and not any(any(path.glob(pattern)) for pattern in _WEIGHTS_IN_FOLDERS):
        return "no weights, such as model.safetensors"
    return None


def _problem_of_file(file: Path) -> str | None:
    """Say that the file is shorter than it says, or unreadable; None for kinds that do not say."""
    try:
        if file.name == _STATE:
            json.loads(file.read_text(encoding="utf-8"))
        if _ZIPS.fullmatch(file.name) and not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
        return _problem_of_safetensors(file) if file.suffix == ".safetensors" else None
    except (OSError, ValueError) as error:
        return f"{file.name}: {error}"


def _problem_of_safetensors(file: Path) -> str | None:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        if not 2 <= length <= size - 8:
            return f"{file.name} is cut off"
        header = opened.read(length)
    try:
        entries = json.loads(header).items()
        ends = [entry["data_offsets"][1] for name, entry in entries if name != "__metadata__"]
        is_whole = 8 + length + max(ends, default=0) == size
    except _BAD_JSON:
        return f"{file.name} has a damaged header"
    return None if is_whole else f"{file.name} is cut off"
