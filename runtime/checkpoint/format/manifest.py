"""Reads checkpoints: their manifest, what it says lies where, and which checkpoints a folder has.

A checkpoint is ``FOLDER/TAG/`` with ``manifest.json`` and safetensors files; ``FOLDER/latest`` names the
newest. The manifest says for every parameter which pieces of it lie where (``slices``), and has the files'
checksums.

Part of the stand-alone script (``script.py``): needs torch alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm.shard_spec import Box, box_shape, full_box, put, take
from .tensor_file import DTYPES, CheckpointError, File

FORMAT = "zlaunch checkpoint"
VERSION = 1
VERSION_WITH_PARTS = 2
"""Is the version of manifests in which parameters are cut (``parts``)."""
MANIFEST = "manifest.json"
LATEST = "latest"
WHOLE = "whole.safetensors"
VALUE = "value"
"""The kind of a slice that holds a parameter's (fp32) value; other kinds are states of the optimizer."""
TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
"""Is how a Hugging Face Trainer names the folders in its output_dir: with the step."""
_ROWS_NUMEL = 1 << 22
_OPEN_FILES = 64
"""The most files kept open: a checkpoint of many ranks has many."""


class Checkpoint:
    """Reads ``FOLDER/TAG``. Raises CheckpointError if it is missing, of another version, or damaged."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.parameters: dict[str, dict[str, Any]] = self.manifest["parameters"]
        self.tied: dict[str, str] = self.manifest["tied"]
        self._files: dict[str, File] = {}

    def file(self, name: str) -> File:
        """Open one of the checkpoint's files, once. Raises CheckpointError."""
        if name not in self._files:
            entry = self.manifest["files"].get(name)
            if entry is None:
                raise CheckpointError(f"{self.folder}: its manifest has no file {name}")
            if entry.get("host") is not None and not (self.folder / name).exists():
                raise CheckpointError(self._elsewhere([name]))
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = File(self.folder / name, entry)
        return self._files[name]

    def _elsewhere(self, names: Sequence[str]) -> str:
        hosts = sorted({self.manifest["files"][name]["host"] for name in names})
        return (
            f"{self.folder}: some files are on {', '.join(hosts)} (saved with use_node_local_storage): "
            "use the same hosts and number of ranks, or merge their folders"
        )

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def verify(self) -> int:
        """Read every byte that is here (not what other nodes keep), and return how many. Raises
        CheckpointError for the first damage.
        """
        nbytes = 0
        for name, entry in self.manifest["files"].items():
            if entry.get("host") is None or (self.folder / name).exists():
                self.file(name).verify()
                nbytes += int(entry["bytes"])
        return nbytes

    def read_into(
        self, target: Tensor, name: str, kind: str = VALUE, start: int = 0, box: Box | None = None
    ) -> None:
        """Fill ``target`` (flat, any dtype) with elements of a parameter, or of its part in a ``box``, from
        ``start`` on: VALUE or a state. Raises CheckpointError for damage, or for elements that no file here
        has.
        """
        entry = self.parameters[name]
        if box is None and "parts" not in entry:
            self._read_pieces(target, name, entry["slices"], kind, start)
            return
        box = box or full_box(entry["shape"])
        row = prod(box_shape(box)[1:])
        # Some rows at a time: the whole parameter may not fit into memory.
        step = max(1, _ROWS_NUMEL // max(1, prod(entry["shape"][1:])))
        stop = start + target.numel()
        at = 0
        for low, high in box[0]:
            for first in range(low, high, step):
                count = min(step, high - first)
                begin = max(start, at * row)
                end = min(stop, (at + count) * row)
                if begin < end:
                    rows = self._read_rows(name, kind, first, first + count, box, target.dtype)
                    flat = take(rows, (((0, count),), *box[1:])).reshape(-1)
                    target[begin - start : end - start] = flat[begin - at * row : end - at * row]
                at += count

    def _read_rows(self, name: str, kind: str, low: int, high: int, box: Box, dtype: torch.dtype) -> Tensor:
        """Return rows of the whole parameter, of which only what is in the ``box`` has been read."""
        entry = self.parameters[name]
        shape = entry["shape"]
        rows = torch.empty((high - low, *shape[1:]), dtype=dtype)
        if "parts" not in entry:
            self._read_pieces(rows.view(-1), name, entry["slices"], kind, low * prod(shape[1:]))
            return rows
        # Boxes that do not cover the parameter would leave uninitialized memory in `rows`.
        if sum(prod(box_shape(part["box"])) for part in entry["parts"]) != prod(shape):
            raise CheckpointError(f"{self.folder}: parts of {name} are missing from its files")
        for part in entry["parts"]:
            if not all(_overlap(own, wanted) for own, wanted in zip(part["box"][1:], box[1:], strict=True)):
                continue
            inner = box_shape(part["box"])[1:]
            at = 0
            for first, last in part["box"][0]:
                begin = max(first, low)
                end = min(last, high)
                if begin < end:
                    own = torch.empty((end - begin, *inner), dtype=dtype)
                    offset = (at + begin - first) * prod(inner)
                    self._read_pieces(own.view(-1), name, part["slices"], kind, offset)
                    put(rows, (((begin - low, end - low),), *part["box"][1:]), own)
                at += last - first
        return rows

    def _read_pieces(self, target: Tensor, name: str, slices: Sequence[Any], kind: str, start: int) -> None:
        """Fill ``target`` with elements from ``start`` on of what the ``slices`` make up."""
        stop = start + target.numel()
        missing = [(start, stop)] if stop > start else []
        away: list[str] = []
        for file, prefix, at, first, numel in slices:
            wanted = [(max(low, first), min(high, first + numel)) for low, high in missing]
            wanted = [(low, high) for low, high in wanted if low < high]
            if not wanted:
                continue
            entry = self.manifest["files"].get(file, {})
            if entry.get("host") is not None and not (self.folder / file).exists():
                # Not an error yet: with node-local folders, a file that is here may have the same elements.
                away.append(file)
                continue
            for low, high in wanted:
                part = target[low - start : high - start]
                self.file(file).read_into(part, f"{prefix}.{kind}", at + low - first)
            # Elements that several files have are read once, from the first.
            missing = [rest for span in missing for rest in _without(span, first, first + numel)]
        if missing and away:
            raise CheckpointError(self._elsewhere(away))
        if missing:
            raise CheckpointError(
                f"{self.folder}: elements of {name} are missing from its files: {missing[:3]}"
            )

    def weights(self, *, exclude_frozen: bool = False) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield every parameter and persistent buffer: name, dtype and shape."""
        for name, entry in self.parameters.items():
            if entry["trainable"] or not exclude_frozen:
                yield name, DTYPES[entry["dtype"]], tuple(entry["shape"])
        for name, entry in self.manifest["buffers"].items():
            yield name, DTYPES[entry["dtype"]], tuple(entry["shape"])

    def weight_into(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill ``target`` (flat) with a parameter's or a buffer's elements. Raises CheckpointError."""
        if name in self.parameters:
            self.read_into(target, name, VALUE, start)
        else:
            self.file(WHOLE).read_into(target, f"buffer.{name}", start)


def _overlap(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> bool:
    return any(start < stop2 and start2 < stop for start, stop in some for start2, stop2 in others)


def _without(span: tuple[int, int], low: int, high: int) -> list[tuple[int, int]]:
    parts = [(span[0], min(span[1], low)), (max(span[0], high), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def checksum(manifest: Mapping[str, Any]) -> int:
    """Compute the checksum of a manifest, whatever its spacing and the order of its keys."""
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError if it is missing, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") == FORMAT and content.get("version") not in (VERSION, VERSION_WITH_PARTS):
            raise CheckpointError(
                f"{path}: has format version {content.get('version')}, but this zlaunch reads {VERSION} and "
                f"{VERSION_WITH_PARTS}: use the zlaunch version that wrote it"
            )
        # After the version: a newer version may compute its checksum in another way, and its message is the
        # better one.
        if checksum(content) != content["crc32"] or content["format"] != FORMAT:
            raise ValueError("its checksum does not match")
    except FileNotFoundError:
        if list(folder.glob("*model_states.pt")):
            raise CheckpointError(
                f"{folder}: is a DeepSpeed checkpoint: run `zlaunch checkpoint import {folder} OUT` first"
            ) from None
        raise CheckpointError(f"{folder}: no checkpoint found (no {MANIFEST})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}): use another checkpoint") from None
    return content


def put_aside(folder: Path, tag: str) -> Path:
    """Return where a tag's checkpoint lies for the moment in which another takes its place."""
    return folder / f".{tag}.old"


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one of our checkpoints, damaged or not."""
    if not (path / MANIFEST).is_file():
        return False
    try:
        # Other programs have a manifest.json, too. The text is not parsed, because a damaged checkpoint is
        # also one of ours.
        return (path / WHOLE).exists() or FORMAT in (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def candidates(folder: Path) -> list[Path]:
    """List the folders that look like checkpoints, newest first; some may be damaged."""
    found: list[tuple[float, str, Path]] = []
    if folder.is_dir():
        for path in folder.glob("*/" + MANIFEST):
            tag = path.parent
            hidden = re.fullmatch(r"\.(.*)\.old", tag.name)
            if not is_checkpoint(tag):
                continue
            # See Note [Atomic saves] in commit.py: `.TAG.old` counts only while TAG has no folder.
            if tag.name.startswith(".") and not (hidden and not (folder / hidden[1]).exists()):
                continue
            # By the time in the manifest, not the file's: copying a folder changes the latter.
            found.append((_saved_at(tag), tag.name, tag))
    return [path for _, _, path in sorted(found, reverse=True)]


def _saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was saved, in seconds since the epoch."""
    try:
        return float(read_manifest(checkpoint)["time"])
    except (CheckpointError, ValueError, TypeError, KeyError):
        return (checkpoint / MANIFEST).stat().st_mtime


def of_trainer(folder: Path) -> dict[str, Path]:
    """Return the checkpoints in a Trainer's output_dir by the names of their ``checkpoint-N``, the largest N
    first. Checkpoints beside them, which ``trainer.save_model()`` leaves at stage 3, are there by their tags,
    and then all are sorted by time, newest first. Empty for a folder without a ``checkpoint-N``.
    """
    if (folder / MANIFEST).exists():
        return {}
    numbered = ((TRAINER_FOLDER.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    found = [(int(name[1]), path) for name, path in numbered if name is not None]
    inner = {path.name: candidates(path) for _, path in sorted(found, reverse=True)}
    chosen = {name: paths[0] for name, paths in inner.items() if paths}
    beside = candidates(folder) if chosen else []
    if beside:
        chosen |= {path.name: path for path in beside}
        chosen = dict(sorted(chosen.items(), key=lambda item: _saved_at(item[1]), reverse=True))
    return chosen


def looks_whole(path: Path) -> bool:
    """Tell whether the manifest is good and all files have their sizes; their content is not read."""
    try:
        checkpoint = Checkpoint(path)
        for name, entry in checkpoint.manifest["files"].items():
            if entry.get("host") is None and (path / name).stat().st_size != entry["bytes"]:
                return False
    except (CheckpointError, OSError):
        return False
    return True


def advice(folder: Path, *, but: str = "") -> str:
    """Say which checkpoint to take in place of ``but``, if there is one."""
    for path in candidates(folder):
        if path.name != but and looks_whole(path):
            return f'; {path.name!r} looks whole: use it, or tag="auto" for the newest whole checkpoint'
    return ""


def verified(path: Path) -> tuple[dict[str, Any], int]:
    """Read every byte of a checkpoint that is here; return its manifest and the number of bytes. Raises
    CheckpointError for damage.
    """
    checkpoint = Checkpoint(path)
    try:
        return checkpoint.manifest, checkpoint.verify()
    finally:
        checkpoint.close()


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint whose every byte is good, and say what is wrong with newer ones."""
    problems: list[str] = []
    for path in candidates(folder):
        try:
            verified(path)
            return path, problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def latest_tag(folder: Path) -> str:
    """Return what ``latest`` says; "" where there is no such file, or none that can be read."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def find(folder: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """Find the checkpoint that ``tag`` means: a name; None for what ``latest`` says; "auto" for the newest
    whole one. Returns None if there is none. Raises CheckpointError for one that ought to be there.
    """
    folder = Path(folder)
    if tag == "auto":
        path, problems = newest_whole(folder)
        for problem in problems:
            print(f"zlaunch: warning: {problem}", file=sys.stderr, flush=True)
        return path
    if tag is None:
        try:
            tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            if (folder / MANIFEST).exists():
                return folder
            if names := [path.name for path in candidates(folder)]:
                warned = f'but no file {LATEST}, so none is loaded: pass tag="{names[0]}", or tag="auto"'
            elif names := list(of_trainer(folder)):
                warned = f"each in its own folder, so none is loaded: pass {folder / names[0]}"
            if names:
                print(
                    f"zlaunch: warning: {folder} has checkpoints ({', '.join(names[:3])}), {warned}",
                    file=sys.stderr,
                    flush=True,
                )
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / LATEST}: cannot be read: {error}") from None
    path = folder / tag
    if tag and not path.exists() and put_aside(folder, tag).exists():
        return put_aside(folder, tag)  # killed between putting the old one aside and the new one in its place
    if tag == LATEST and path.is_file():
        raise CheckpointError(
            f"{path}: is the file that names the newest checkpoint, not a tag: omit the tag, or pass "
            'tag="auto" for the newest whole checkpoint'
        )
    if not tag or not path.is_dir():
        raise CheckpointError(f"{folder}: has no checkpoint {tag!r}{advice(folder)}")
    return path
