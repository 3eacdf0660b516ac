#!/usr/bin/env python3
"""Read a zlaunch checkpoint, and write its weights in the formats that others read. Needs torch alone.

This file is also put beside every checkpoint under the name ``zero_to_fp32.py``, so that the weights can be
had without zlaunch:

    python zero_to_fp32.py FOLDER OUT [--tag TAG] [--dtype fp32|bf16|fp16] [--max_shard_size 5GB]
                                      [--format safetensors|bin]

A checkpoint is ``FOLDER/TAG/`` with ``manifest.json`` and safetensors files; ``FOLDER/latest`` names the
newest. The manifest says for every parameter which pieces of it lie where (``slices``), and has a checksum
for every CHUNK_BYTES of every file, so that whoever reads a part checks that part.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
FORMAT, VERSION = "zlaunch checkpoint", 1
MANIFEST, LATEST, WHOLE = "manifest.json", "latest", "whole.safetensors"
CHUNK_BYTES = 1 << 22
VALUE = "value"
"""What a slice holds of a parameter: its (fp32) value, or a state of the optimizer by name."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PIECE_NUMEL = 1 << 20
_AHEAD = 4
"""Chunks that are read ahead."""
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_OPEN_FILES = 64
"""A checkpoint of many ranks has many."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the text names the file and what to do."""


# -- files ------------------------------------------------------------------------------------------------


class File:
    """One safetensors file of a checkpoint, read in ranges. Every chunk that is touched is checked once."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        """``entry``: its bytes and checksums. Raises CheckpointError if it is missing, cut or damaged."""
        self.path, self._fd = path, -1
        self._nbytes, self._sums = int(entry["bytes"]), list(entry["crc32"])
        self._good: set[int] = set()
        self._held, self._content, self._before = -1, torch.empty(0, dtype=torch.uint8), -1
        """The chunk in memory and its bytes; the one that was read last."""
        self._ahead: dict[int, Future[Tensor]] = {}
        self._free: list[Tensor] = []
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        size = os.fstat(self._fd).st_size
        if size != self._nbytes:
            self.close()
            raise CheckpointError(f"{path}: has {size} bytes, not {self._nbytes}: it is not whole")
        header = bytearray(8)
        self._bytes(0, memoryview(header))
        length = int.from_bytes(header, "little")
        if not 0 < length <= self._nbytes - 8:
            raise CheckpointError(f"{path}: its header is damaged")
        self._start = 8 + length
        header = bytearray(length)
        self._bytes(8, memoryview(header))
        self.tensors: dict[str, dict[str, Any]] = json.loads(header)
        self.tensors.pop("__metadata__", None)

    def close(self) -> None:
        """Close the file."""
        for job in self._ahead.values():
            if not job.cancel():
                job.exception()  # it is being read; the descriptor may not go yet
        self._ahead.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor, flat. Raises CheckpointError for damage."""
        dtype, numel = self._facts(name)
        result = torch.empty((numel if stop is None else stop) - start, dtype=dtype)
        self.read_into(result, name, start)
        return result

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill ``target`` (flat, on the CPU, any dtype) with a tensor's elements from ``start`` on. Raises
        CheckpointError for damage.
        """
        dtype, numel = self._facts(name)
        if not 0 <= start <= start + target.numel() <= numel:
            raise CheckpointError(f"{self.path}: {name} has {numel} elements, not {start + target.numel()}")
        offset = self._start + self.tensors[name]["data_offsets"][0] + start * dtype.itemsize
        if target.dtype == dtype and target.is_contiguous():
            self._bytes(offset, _memory(target))
            return
        for low in range(0, target.numel(), _PIECE_NUMEL):
            piece = torch.empty(min(_PIECE_NUMEL, target.numel() - low), dtype=dtype)
            self._bytes(offset + low * dtype.itemsize, _memory(piece))
            target[low : low + piece.numel()].copy_(piece)

    def _facts(self, name: str) -> tuple[torch.dtype, int]:
        try:
            entry = self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}") from None
        dtype = DTYPES[entry["dtype"]]
        return dtype, (entry["data_offsets"][1] - entry["data_offsets"][0]) // dtype.itemsize

    def read_whole(self, name: str) -> Tensor:
        """A tensor in its shape. Raises CheckpointError."""
        return self.read(name).view(tuple(self.tensors[name]["shape"]))

    def verify(self) -> None:
        """Read all of it. Raises CheckpointError for damage."""
        self._held = -1
        for chunk in range(len(self._sums)):
            self._checked(chunk)

    def _checked(self, chunk: int) -> Tensor:
        """The bytes of a chunk. Where one after the other is wanted, threads read and check the next ones."""
        if chunk == self._held:
            return self._content
        in_order, self._before = chunk == self._before + 1, chunk
        for passed in [number for number in self._ahead if not chunk <= number <= chunk + _AHEAD]:
            other = self._ahead.pop(passed)
            if not other.cancel():
                other.exception()
        job = self._ahead.pop(chunk, None)
        if in_order:
            for following in range(chunk + 1, min(chunk + 1 + _AHEAD, len(self._sums))):
                if following not in self._ahead and following not in self._good:
                    self._ahead[following] = _readers().submit(self._load, following)
        self._held = -1
        former, self._content = self._content, job.result() if job is not None else self._load(chunk)
        self._held = chunk
        self._free.append(former)
        self._good.add(chunk)
        return self._content

    def _load(self, chunk: int) -> Tensor:
        """Read and check one chunk; its bytes begin the result. Raises CheckpointError."""
        offset = chunk * CHUNK_BYTES
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if not buffer.numel():
            buffer = torch.empty(min(CHUNK_BYTES, self._nbytes), dtype=torch.uint8)
        part = _memory(buffer)[: min(CHUNK_BYTES, self._nbytes - offset)]
        self._fill(part, offset)
        if zlib.crc32(part) != self._sums[chunk]:
            raise CheckpointError(
                f"{self.path}: is damaged between bytes {offset} and {offset + len(part)}: take another "
                "checkpoint, or restore the file"
            )
        return buffer

    def _fill(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at {offset + done}: it is not whole")
            done += count

    def _bytes(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the file at ``offset``, every byte checked by the chunk that it is in."""
        end = offset + len(view)
        for chunk in range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            first, last = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self._nbytes)
            low, high = max(first, offset), min(last, end)
            target = view[low - offset : high - offset]
            if chunk in self._good and chunk != self._held:
                self._fill(target, low)
            else:
                target[:] = _memory(self._checked(chunk))[low - first : high - first]


@cache
def _readers() -> ThreadPoolExecutor:
    """A few threads for all files."""
    return ThreadPoolExecutor(_AHEAD, thread_name_prefix="zlaunch-read")


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]


# -- checkpoints ------------------------------------------------------------------------------------------


class Checkpoint:
    """``FOLDER/TAG``. Raises CheckpointError for one that is missing, of another version, or damaged."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.parameters: dict[str, dict[str, Any]] = self.manifest["parameters"]
        self.tied: dict[str, str] = self.manifest["tied"]
        self._files: dict[str, File] = {}

    def file(self, name: str) -> File:
        """One of its files, opened once. Raises CheckpointError."""
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
            f"{self.folder}: parts of it are on {', '.join(hosts)} (saved with use_node_local_storage): "
            "start on the hosts it was saved on with as many ranks, or copy their folders together"
        )

    def close(self) -> None:
        """Close its files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def verify(self) -> int:
        """Read every byte that is here (not what other nodes keep); returns how many. Raises CheckpointError
        for the first damage.
        """
        nbytes = 0
        for name, entry in self.manifest["files"].items():
            if entry.get("host") is None or (self.folder / name).exists():
                self.file(name).verify()
                nbytes += int(entry["bytes"])
        return nbytes

    def read_into(self, target: Tensor, name: str, kind: str = VALUE, start: int = 0) -> None:
        """Fill ``target`` (flat, any dtype) with elements of a parameter from ``start`` on: VALUE or a state.

        Raises CheckpointError for damage, or for elements that no file here has.
        """
        stop = start + target.numel()
        missing = [(start, stop)] if stop > start else []
        away: list[str] = []
        for file, prefix, at, first, numel in self.parameters[name]["slices"]:
            wanted = [(max(low, first), min(high, first + numel)) for low, high in missing]
            wanted = [(low, high) for low, high in wanted if low < high]
            if not wanted:
                continue
            entry = self.manifest["files"].get(file, {})
            if entry.get("host") is not None and not (self.folder / file).exists():
                away.append(file)
                continue
            for low, high in wanted:
                part = target[low - start : high - start]
                self.file(file).read_into(part, f"{prefix}.{kind}", at + low - first)
            missing = [rest for span in missing for rest in _without(span, first, first + numel)]
        if missing and away:
            raise CheckpointError(self._elsewhere(away))
        if missing:
            raise CheckpointError(
                f"{self.folder}: elements of {name} are in none of its files: {missing[:3]}"
            )

    def weights(self, *, exclude_frozen: bool = False) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Every parameter and persistent buffer: name, dtype and shape."""
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


def _without(span: tuple[int, int], low: int, high: int) -> list[tuple[int, int]]:
    parts = [(span[0], min(span[1], low)), (max(span[0], high), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def checksum(manifest: Mapping[str, Any]) -> int:
    """Of a manifest, whatever its spacing and the order of its keys."""
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError for a manifest that is missing, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") == FORMAT and content.get("version") != VERSION:
            raise CheckpointError(
                f"{path}: has layout {content.get('version')}, and this zlaunch reads {VERSION}: "
                "use the version of zlaunch that wrote it"
            )
        if checksum(content) != content["crc32"] or content["format"] != FORMAT:
            raise ValueError("its checksum does not fit")
    except FileNotFoundError:
        if list(folder.glob("*model_states.pt")):
            raise CheckpointError(
                f"{folder}: was written by DeepSpeed: `zlaunch checkpoint import {folder} OUT` converts it"
            ) from None
        raise CheckpointError(f"{folder}: no checkpoint is there (no {MANIFEST})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}): take another checkpoint") from None
    return content


def put_aside(folder: Path, tag: str) -> Path:
    """Where the checkpoint of a tag is for the moment in which another takes its place."""
    return folder / f".{tag}.old"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one of our checkpoints, damaged or not."""
    if not (path / MANIFEST).is_file():
        return False
    try:
        return (path / WHOLE).exists() or FORMAT in (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def candidates(folder: Path) -> list[Path]:
    """Folders that look like checkpoints, newest first; some may be damaged."""
    found: list[tuple[float, str, Path]] = []
    for path in folder.glob("*/" + MANIFEST) if folder.is_dir() else ():
        tag = path.parent
        hidden = re.fullmatch(r"\.(.*)\.old", tag.name)
        if not is_checkpoint(tag):
            continue
        if tag.name.startswith(".") and not (hidden and not (folder / hidden[1]).exists()):
            continue
        try:
            moment = float(read_manifest(tag)["time"])
        except (CheckpointError, ValueError, TypeError, KeyError):
            moment = path.stat().st_mtime
        found.append((moment, tag.name, tag))
    return [path for _, _, path in sorted(found, reverse=True)]


def looks_whole(path: Path) -> bool:
    """Whether the manifest is good and all files are there in their sizes; their content is not read."""
    try:
        checkpoint = Checkpoint(path)
        for name, entry in checkpoint.manifest["files"].items():
            if entry.get("host") is None and (path / name).stat().st_size != entry["bytes"]:
                return False
    except (CheckpointError, OSError):
        return False
    return True


def advice(folder: Path, *, but: str = "") -> str:
    """Which checkpoint to take in place of ``but``, if there is one."""
    for path in candidates(folder):
        if path.name != but and looks_whole(path):
            return f'; {path.name!r} looks whole, and tag="auto" checks and takes the newest that is'
    return ""


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte is good, and what is wrong with those that are newer."""
    problems: list[str] = []
    for path in candidates(folder):
        try:
            checkpoint = Checkpoint(path)
            try:
                checkpoint.verify()
            finally:
                checkpoint.close()
            return path, problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def find(folder: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """The checkpoint that ``tag`` means: a name; None for what ``latest`` says; "auto" for the newest whole
    one. None if there is none. Raises CheckpointError for one that ought to be there.
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
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / LATEST}: cannot be read: {error}") from None
    path = folder / tag
    if tag and not path.exists() and put_aside(folder, tag).exists():
        return put_aside(folder, tag)  # killed between putting the old one aside and the new one in its place
    if not tag or not path.is_dir():
        raise CheckpointError(f"{folder}: has no checkpoint {tag!r}{advice(folder)}")
    return path


# -- export -----------------------------------------------------------------------------------------------


def export(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
    kind: str = "safetensors",
    exclude_frozen: bool = False,
) -> list[Path]:
    """Write the weights to the folder ``out`` as Hugging Face reads them; returns the files.

    ``kind`` is "safetensors" (``model.safetensors``) or "bin" (``pytorch_model.bin``); what is larger than
    ``max_shard_bytes`` is split, with an index. Floating tensors are cast to ``dtype``. Memory: some 40 MiB,
    whatever the model's size; "bin" maps a temporary file as large as a shard. A file appears whole or not
    at all. Raises OSError, and CheckpointError also where ``out`` has weights in other files.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    shards = _split(checkpoint, dtype, max_shard_bytes, exclude_frozen)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names = [
        f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{suffix}"
        for i in range(len(shards))
    ]
    index = out / f"{stem}.{suffix}.index.json"
    others = [path for path in out.iterdir() if _WEIGHTS.fullmatch(path.name)]
    stale = [path.name for path in others if path.name not in names and path != index]
    if stale or (index.exists() and len(shards) == 1):
        raise CheckpointError(
            f"{out}: has other weights ({(stale or [index.name])[0]}), which might be read in place of "
            "these: remove them, or take another folder"
        )
    written: list[Path] = []
    for name, shard in zip(names, shards, strict=True):
        temporary = out / f".{name}.{os.getpid()}.tmp"
        try:
            _write_safetensors(checkpoint, temporary, shard)
            if kind == "bin":
                _to_bin(temporary, checkpoint.tied)
            os.replace(temporary, out / name)
        finally:
            temporary.unlink(missing_ok=True)
        written.append(out / name)
    if len(shards) > 1:
        places = {w: name for name, shard in zip(names, shards, strict=True) for w in shard}
        if kind == "bin":
            places |= {alias: places[name] for alias, name in checkpoint.tied.items() if name in places}
        size = sum(_nbytes(*entry) for shard in shards for entry in shard.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
        temporary = out / f".{index.name}.{os.getpid()}.tmp"
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, index)
        written.append(index)
    return written


_Shard = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    return nbytes


def _split(checkpoint: Checkpoint, dtype: torch.dtype, limit: int, exclude_frozen: bool) -> list[_Shard]:
    shards: list[_Shard] = [{}]
    filled = 0
    for name, own, shape in checkpoint.weights(exclude_frozen=exclude_frozen):
        kind = dtype if own.is_floating_point else own
        nbytes = _nbytes(kind, shape)
        if shards[-1] and filled + nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = (kind, shape)
        filled += nbytes
    return shards


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with, padded so that the data starts at a multiple of 4096."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = _nbytes(dtype, shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    return len(text).to_bytes(8, "little") + text


def _write_safetensors(checkpoint: Checkpoint, path: Path, shard: _Shard) -> None:
    tied = {alias: name for alias, name in checkpoint.tied.items() if name in shard}
    with open(path, "wb") as file:
        file.write(header_of(shard, tied))
        for name, (dtype, shape) in shard.items():
            numel = _nbytes(dtype, shape) // dtype.itemsize
            for start in range(0, numel, _PIECE_NUMEL):
                piece = torch.empty(min(_PIECE_NUMEL, numel - start), dtype=dtype)
                checkpoint.weight_into(piece, name, start)
                file.write(_memory(piece))
        file.flush()
        os.fsync(file.fileno())


def _to_bin(path: Path, tied: Mapping[str, str]) -> None:
    """Replace a safetensors file by what torch.save makes of its tensors, mapped, not read."""
    import numpy as np

    tensors: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        low, high = entry["data_offsets"]
        flat = torch.empty(0, dtype=torch.uint8)
        if high > low:
            mapped = np.memmap(path, np.uint8, "c", 8 + length + low, (high - low,))
            flat = torch.from_numpy(mapped)
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(tuple(entry["shape"]))
    tensors |= {alias: tensors[name] for alias, name in tied.items() if name in tensors}
    other = path.with_name(path.name + "2")
    try:
        with open(other, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(other, path)
    except RuntimeError as error:  # how torch.save says that the disk is full
        raise OSError(errno.EIO, f"cannot be written by torch.save: {error}", str(path)) from None
    finally:
        other.unlink(missing_ok=True)


def parse_size(text: str) -> int:
    """``"5GB"``, ``"500MiB"`` or a number of bytes. Raises ValueError."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]I?)?B?\s*", text.upper())
    if not found or found[1].count(".") > 1 or (found[2] or "") not in units or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a size: write 5GB or 500MiB")
    return max(1, int(float(found[1]) * units[found[2] or ""]))


# -- DeepSpeed's names for it -----------------------------------------------------------------------------


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Checkpoint:
    path = find(checkpoint_dir, tag)
    if path is None:
        raise CheckpointError(f"{checkpoint_dir}: no checkpoint is there (no file {LATEST!r})")
    return Checkpoint(path)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole model's weights on the CPU, floating ones in fp32; tied weights are one tensor.

    ``lazy_mode`` is accepted. For a model larger than memory use :func:`export`. Raises CheckpointError.
    """
    checkpoint = _open(checkpoint_dir, tag)
    state: dict[str, Tensor] = {}
    for name, dtype, shape in checkpoint.weights(exclude_frozen=exclude_frozen_parameters):
        state[name] = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
        checkpoint.weight_into(state[name].view(-1), name)
    state |= {alias: state[name] for alias, name in checkpoint.tied.items() if name in state}
    checkpoint.close()
    return state


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load a checkpoint's fp32 weights into a plain model on the CPU. Raises CheckpointError."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """As :func:`export` does, in fp32. Raises CheckpointError, OSError, ValueError."""
    limit = parse_size(str(max_shard_size)) if max_shard_size is not None else sys.maxsize
    export(
        _open(checkpoint_dir, tag),
        output_dir,
        max_shard_bytes=limit,
        kind="safetensors" if safe_serialization else "bin",
        exclude_frozen=exclude_frozen_parameters,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Write the weights of a zlaunch checkpoint to a folder.")
    parser.add_argument("checkpoint_dir", help="the folder with `latest` in it, or one checkpoint's own")
    parser.add_argument("output_dir")
    parser.add_argument("-t", "--tag", help='which checkpoint; "auto" for the newest whole one')
    parser.add_argument("--dtype", choices=list(PRECISIONS), default="fp32")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--format", choices=["safetensors", "bin"], default="safetensors")
    parser.add_argument("--safe_serialization", action="store_true", help="the same as --format safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted")
    args = parser.parse_args(arguments)
    try:
        written = export(
            _open(args.checkpoint_dir, args.tag),
            args.output_dir,
            dtype=PRECISIONS[args.dtype],
            max_shard_bytes=parse_size(args.max_shard_size),
            kind=args.format,
            exclude_frozen=args.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"zero_to_fp32: error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
