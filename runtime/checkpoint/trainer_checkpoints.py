"""Finds the checkpoint from which a Hugging Face Trainer can resume.

Note [Complete]
The Trainer writes ``OUTPUT_DIR/checkpoint-N`` file by file: the model, the engine's checkpoint (or the
optimizer), the random states of all ranks, and ``trainer_state.json`` last. A process that is killed then
leaves a folder from which the Trainer cannot resume: each restart would fail in the same way.
A folder is complete if it has the last file, what comes before it, and if each file has its end: torch.save
writes an archive whose index is at the end, and safetensors files name their length at the start.
"""

from __future__ import annotations

import json
import re
import zipfile
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


def is_output_dir(folder: Path) -> bool:
    """Tell whether ``folder`` has a Trainer's ``checkpoint-N`` in it."""
    return any(is_checkpoint(path) for path in folder.glob("checkpoint-*"))


def is_checkpoint(folder: Path) -> bool:
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
    output_dir, last = (folder.parent, _step(folder)) if is_checkpoint(folder) else (folder, None)
    found = [path for path in output_dir.glob("checkpoint-*") if is_checkpoint(path)]
    for path in sorted(found, key=_step, reverse=True):
        if last is not None and _step(path) > last:
            continue
        problem = problem_of(path)
        if problem is None:
            return path, problems
        problems.append(f"{path}: is incomplete ({problem})")
    return None, problems


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def problem_of(path: Path) -> str | None:
    """Say what keeps the Trainer from resuming here; None for a complete folder. See Note [Complete]."""
    try:
        json.loads((path / _STATE).read_text(encoding="utf-8"))
        files = [file for file in path.iterdir() if file.is_file()]
        cut = next((file.name for file in files if not _has_end(file)), None)
    except FileNotFoundError:
        return f"no {_STATE}"
    except (OSError, ValueError) as error:
        return f"{_STATE}: {error}"
    if cut is not None:
        return f"{cut} is cut off"
    if not any(re.fullmatch(r"rng_state(_\d+)?\.pth", file.name) for file in files):
        return "no rng_state: saved with save_only_model, or interrupted"
    if (path / LATEST).exists():
        try:
            inner = find(path)
        except CheckpointError as error:
            return str(error)
        if inner is None or not looks_whole(inner):
            return f"{path.name}/{(path / LATEST).read_text().strip()} is damaged"
    elif candidates(path) or not list(path.glob("optimizer*")):
        return f"no optimizer state, and no file {LATEST}"
    return None


def _has_end(file: Path) -> bool:
    """Tell whether the file is as long as it says; true for kinds that do not say."""
    if _ZIPS.fullmatch(file.name):
        return zipfile.is_zipfile(file)
    if file.suffix != ".safetensors":
        return True
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        if not 2 <= length <= size - 8:
            return False
        header = json.loads(opened.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0) == size
