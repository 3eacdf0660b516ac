"""Reads safetensors files in checked ranges; knows their headers and their names for dtypes.

Part of the stand-alone script (``script.py``): needs torch alone.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ZlaunchError
from ...threads import thread_pool

CHUNK_BYTES = 1 << 22
"""Bytes for which a file has one checksum each, so that reading a part checks that part."""
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
_PIECE_NUMEL = 1 << 20
_AHEAD = 4
"""Number of chunks that are read ahead."""


class CheckpointError(ZlaunchError, RuntimeError):
    """Says that a checkpoint cannot be written or read; the text names the file and what to do."""


class File:
    """Reads one safetensors file of a checkpoint in ranges. Every chunk that is touched is checked once."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        """Open it; ``entry``: its bytes and checksums. Raises CheckpointError if missing, cut or damaged."""
        self.path = path
        self._fd = -1
        self._nbytes = int(entry["bytes"])
        self._sums = list(entry["crc32"])
        self._good: set[int] = set()
        self._held = -1
        self._content = torch.empty(0, dtype=torch.uint8)
        self._before = -1
        """The chunk in memory and its bytes; the chunk that was read last."""
        self._ahead: dict[int, Future[Tensor]] = {}
        self._free: list[Tensor] = []
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        size = os.fstat(self._fd).st_size
        if size != self._nbytes:
            self.close()
            raise CheckpointError(f"{path}: has {size} bytes, expected {self._nbytes}: it is damaged")
        header = bytearray(8)
        # Through _bytes(), so the checksum of the first chunk is compared before its numbers are used.
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
        """Read elements ``start`` to ``stop`` of a tensor, flat. Raises CheckpointError for damage."""
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
            self._bytes(offset, memory_of(target))
            return
        for low in range(0, target.numel(), _PIECE_NUMEL):
            piece = torch.empty(min(_PIECE_NUMEL, target.numel() - low), dtype=dtype)
            self._bytes(offset + low * dtype.itemsize, memory_of(piece))
            target[low : low + piece.numel()].copy_(piece)

    def _facts(self, name: str) -> tuple[torch.dtype, int]:
        try:
            entry = self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}") from None
        dtype = DTYPES[entry["dtype"]]
        return dtype, (entry["data_offsets"][1] - entry["data_offsets"][0]) // dtype.itemsize

    def read_whole(self, name: str) -> Tensor:
        """Read a tensor in its shape. Raises CheckpointError."""
        return self.read(name).view(tuple(self.tensors[name]["shape"]))

    def verify(self) -> None:
        """Read the whole file. Raises CheckpointError for damage."""
        self._held = -1
        for chunk in range(len(self._sums)):
            self._checked(chunk)

    def _checked(self, chunk: int) -> Tensor:
        """Return a chunk's bytes. While chunks are wanted in order, threads read and check the next ones."""
        if chunk == self._held:
            return self._content
        # A jump reads one chunk. Reading ahead there would read what is not wanted.
        in_order = chunk == self._before + 1
        self._before = chunk
        for passed in [number for number in self._ahead if not chunk <= number <= chunk + _AHEAD]:
            # A read that runs is awaited here: close() does not see it any more, and must not close its
            # descriptor.
            other = self._ahead.pop(passed)
            if not other.cancel():
                other.exception()
        job = self._ahead.pop(chunk, None)
        if in_order:
            for following in range(chunk + 1, min(chunk + 1 + _AHEAD, len(self._sums))):
                if following not in self._ahead and following not in self._good:
                    self._ahead[following] = _readers().submit(self._load, following)
        # If the read below fails, the content in memory belongs to no chunk.
        self._held = -1
        former = self._content
        self._content = job.result() if job is not None else self._load(chunk)
        self._held = chunk
        self._free.append(former)
        self._good.add(chunk)
        return self._content

    def _load(self, chunk: int) -> Tensor:
        """Read and check one chunk; its bytes begin the result. Raises CheckpointError."""
        offset = chunk * CHUNK_BYTES
        try:
            # No look before: several readers take from this list, and pop() is atomic.
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if not buffer.numel():
            buffer = torch.empty(min(CHUNK_BYTES, self._nbytes), dtype=torch.uint8)
        part = memory_of(buffer)[: min(CHUNK_BYTES, self._nbytes - offset)]
        self._fill(part, offset)
        if zlib.crc32(part) != self._sums[chunk]:
            raise CheckpointError(
                f"{self.path}: is damaged between bytes {offset} and {offset + len(part)}: use another "
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
                raise CheckpointError(f"{self.path}: ends at {offset + done}: it is truncated")
            done += count

    def _bytes(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the file at ``offset``, every byte checked by the chunk that it is in."""
        end = offset + len(view)
        for chunk in range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            first = chunk * CHUNK_BYTES
            last = min((chunk + 1) * CHUNK_BYTES, self._nbytes)
            low = max(first, offset)
            high = min(last, end)
            target = view[low - offset : high - offset]
            # A chunk that was good once is read without its checksum, only the bytes that are wanted.
            if chunk in self._good and chunk != self._held:
                self._fill(target, low)
            else:
                target[:] = memory_of(self._checked(chunk))[low - first : high - first]


@cache
def _readers() -> ThreadPoolExecutor:
    """Return a few threads for all files."""
    return thread_pool(_AHEAD, "zlaunch-read")


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a flat tensor on the CPU."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]


def to_json(tensor: Tensor) -> Any:
    """Return a small tensor as JSON: a number, or its shape with its elements in base64."""
    if tensor.numel() == 1:
        return tensor.tolist()  # nested lists keep its shape
    content = memory_of(tensor.detach().cpu().contiguous().view(-1))
    return {"shape": list(tensor.shape), "base64": base64.b64encode(content).decode()}


def from_json(dtype: str, value: Any, device: torch.device | None = None) -> Any:
    """Return what :func:`to_json` has made of a tensor, or the plain value of an entry without a dtype."""
    if not dtype:
        return value
    if isinstance(value, Mapping):
        content = bytearray(base64.b64decode(value["base64"]))
        return torch.frombuffer(content, dtype=DTYPES[dtype]).view(value["shape"]).to(device)
    return torch.tensor(value, dtype=DTYPES[dtype], device=device)


def bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside ``path`` to write to; the file takes its place at the end, whole, or is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Build the header of a safetensors file, padded so that the data starts at a multiple of 4096."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = bytes_of(dtype, shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    return len(text).to_bytes(8, "little") + text
