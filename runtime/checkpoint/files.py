"""Files of tensors in the safetensors format, written as a stream and read in ranges, every byte checked.

Others read these files with the safetensors library. The checksums are beside them, in the manifest: one for
each CHUNK_BYTES, so that a reader of a part checks what it reads without reading the rest.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 22
_ALIGN = 4096
"""The data of a file starts at a multiple of this."""
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


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the text names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of one whole file."""

    nbytes: int
    crc32: tuple[int, ...]
    """One for each CHUNK_BYTES."""

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "crc32": list(self.crc32)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Checksums:
        return Checksums(int(value["bytes"]), tuple(map(int, value["crc32"])))


class FileWriter:
    """Writes tensors whose dtypes and shapes are known beforehand, one after the other."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """``tensors`` in the order in which they will come. Raises OSError."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (dtype, shape) in tensors.items():
            nbytes = dtype.itemsize
            for length in shape:
                nbytes *= length
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGN)
        self._order = list(tensors)
        self._crc, self._filled = 0, 0
        self._sums: list[int] = []
        self._nbytes = 0
        self._file = open(path, "xb")  # noqa: SIM115  closed by close
        self._append(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; they come in the order that was announced. Raises OSError."""
        assert self._order and self._order[0] == name, f"{name} before {self._order[:1]}"
        self._order.pop(0)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._append(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type, unused-ignore]

    def _append(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + CHUNK_BYTES - self._filled]
            self._file.write(part)
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            at += len(part)
            if self._filled == CHUNK_BYTES:
                self._sums.append(self._crc)
                self._crc = self._filled = 0
        self._nbytes += len(data)

    def close(self) -> Checksums:
        """Bring everything to the disk. Raises OSError."""
        assert not self._order, f"not written: {self._order}"
        if self._filled:
            self._sums.append(self._crc)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Checksums(self._nbytes, tuple(self._sums))


class FileReader:
    """Reads ranges of the tensors of a file. Every chunk that is touched is checked once."""

    def __init__(self, path: Path, sums: Checksums) -> None:
        """Raises CheckpointError for a file that is missing, too short or damaged."""
        self.path, self._sums = path, sums
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        size = os.fstat(self._fd).st_size
        if size != sums.nbytes:
            self.close()
            raise CheckpointError(f"{path}: has {size} bytes, not {sums.nbytes}: it is not whole")
        self._good: set[int] = set()
        length = int.from_bytes(self._bytes(0, 8), "little")
        if not 0 < length <= sums.nbytes - 8:
            raise CheckpointError(f"{path}: its header is damaged")
        self._start = 8 + length
        self.tensors: dict[str, dict[str, Any]] = json.loads(self._bytes(8, length))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor, flat. Raises CheckpointError for damage."""
        entry = self.tensors[name]
        dtype = DTYPES[entry["dtype"]]
        low, high = entry["data_offsets"]
        numel = (high - low) // dtype.itemsize
        stop = numel if stop is None else stop
        assert 0 <= start <= stop <= numel
        if start == stop:
            return torch.empty(0, dtype=dtype)
        data = self._bytes(self._start + low + start * dtype.itemsize, (stop - start) * dtype.itemsize)
        return torch.frombuffer(data, dtype=dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return tuple(self.tensors[name]["shape"])

    def verify(self) -> None:
        """Read all of it. Raises CheckpointError for damage."""
        for chunk in range(len(self._sums.crc32)):
            self._check(chunk)

    def _bytes(self, offset: int, nbytes: int) -> bytearray:
        for chunk in range(offset // CHUNK_BYTES, (offset + nbytes - 1) // CHUNK_BYTES + 1):
            if chunk not in self._good:
                self._check(chunk)
        data = bytearray(nbytes)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [memoryview(data)[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at {offset + done}: it is not whole")
            done += count
        return data

    def _check(self, chunk: int) -> None:
        data = os.pread(self._fd, CHUNK_BYTES, chunk * CHUNK_BYTES)
        if zlib.crc32(data) != self._sums.crc32[chunk]:
            raise CheckpointError(
                f"{self.path}: is damaged between bytes {chunk * CHUNK_BYTES} and "
                f"{chunk * CHUNK_BYTES + len(data)}: take another checkpoint, or restore the file"
            )
        self._good.add(chunk)
