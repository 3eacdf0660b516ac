"""Test files of tensors: readable by others, in ranges, and never wrong."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from zlaunch.runtime.checkpoint.format import files, tensor_file
from zlaunch.runtime.checkpoint.format.commit import new_owner, replace_file
from zlaunch.runtime.checkpoint.format.files import FileWriter
from zlaunch.runtime.checkpoint.format.tensor_file import NAMES, CheckpointError, File
from zlaunch.runtime.comm.pending import Pending
from zlaunch.runtime.offload.transfer import HostLink

DTYPES = list(NAMES)
LINK = HostLink(torch.device("cpu"), pin=False)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def write(path: Path, tensors: dict[str, torch.Tensor], pieces: int = 1) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    file = FileWriter(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, LINK)
    for name, value in tensors.items():
        for piece in value.reshape(-1).tensor_split(pieces):
            file.write(name, piece)
    return file.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_file, files):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=2)), min_size=0, max_size=6
    ),
    pieces=st.integers(1, 3),
)
def test_the_safetensors_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[torch.dtype, list[int]]], pieces: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    tensors = {f"t{i}": tensor(dtype, *shape) for i, (dtype, shape) in enumerate(shapes)}
    sums = write(path, tensors, pieces)
    assert sums["bytes"] == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read
    )
    reader = File(path, json.loads(json.dumps(sums)))
    reader.verify()
    for name, value in tensors.items():
        assert torch.equal(reader.read_whole(name), value)
    reader.close()


@given(start=st.integers(0, 3000), length=st.integers(0, 3000))
@settings(max_examples=40, deadline=None)
def test_ranges(tmp_path_factory: pytest.TempPathFactory, start: int, length: int) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    value = torch.arange(3000, dtype=torch.float32)
    sums = write(path, {"before": torch.ones(7, dtype=torch.uint8), "value": value})
    reader = File(path, sums)
    stop = min(start + length, 3000)
    assert torch.equal(reader.read("value", start, stop), value[start:stop])
    reader.close()


def test_every_flipped_bit_and_every_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": tensor(torch.float32, 900), "b": tensor(torch.bfloat16, 11, 7)}
    sums = write(path, tensors)
    whole = path.read_bytes()
    for at in [*range(0, 64), *range(4096, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"x\.safetensors.*damaged"):
            File(path, sums).verify()
    for length in (0, 1, 8, 4096, len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"x")[:length])
        with pytest.raises(CheckpointError, match="bytes, expected"):
            File(path, sums)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        File(path, sums)


def test_damage_elsewhere_does_not_keep_a_part_from_being_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    value = torch.arange(5000, dtype=torch.float32)
    sums = write(path, {"value": value})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = File(path, sums)
    assert torch.equal(reader.read("value", 0, 100), value[:100])
    with pytest.raises(CheckpointError, match="damaged between bytes"):
        reader.read("value", 4990, 5000)
    reader.close()


@pytest.mark.parametrize("length", [0, 1, 3900, 4000, 4100])
def test_the_data_begins_at_a_page(length: int) -> None:
    header = tensor_file.header_of({"a" * length: (torch.float32, (3,))}, {})
    assert len(header) % 4096 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8


def test_it_does_not_write_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        FileWriter(path, {}, LINK)
    assert path.read_text() == "somebody's"


def test_a_full_disk_is_an_error_at_the_latest_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left|File too large"):
        FileWriter(tmp_path / "x.safetensors", {"a": (torch.uint8, (1 << 60,))}, LINK)


def test_a_dtype_that_the_format_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        FileWriter(tmp_path / "x.safetensors", {"a": (torch.complex64, (3,))}, LINK)


def test_many_threads_replace_one_file(tmp_path: Path) -> None:
    """Replace a file as engines do that save into one folder; what a killed process has left goes."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    parts = new_owner().split("-")
    parts[-2] = str(dead.pid)
    (tmp_path / f".latest.{'-'.join(parts)}.new").write_text("half")

    def replace(index: int) -> None:
        for _ in range(50):
            replace_file(tmp_path / "latest", f"global_step{index}".encode())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text().startswith("global_step")


@pytest.mark.parametrize("possible", [0, 2])
def test_a_file_needs_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, possible: int) -> None:
    """Python 3.12 starts none while it ends."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if len(started) == possible:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    tensors = {"a": tensor(torch.float32, 90_001), "b": tensor(torch.uint8, 7)}
    described = write(tmp_path / "x.safetensors", tensors, pieces=3)
    assert len(described["crc32"]) > 80 and len(started) == possible
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert not any(thread.is_alive() for thread in started)


class FailedDevice(HostLink):
    """Raises what CUDA raises once a kernel has failed."""

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        return FailedCopy()

    def release(self, tensor: torch.Tensor) -> None:
        super().release(tensor)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FailedCopy(Pending):
    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("numel", [100, 100_000])
def test_a_device_that_fails_ends_the_writing(tmp_path: Path, numel: int) -> None:
    threads = threading.active_count()
    path, link = tmp_path / "x.safetensors", FailedDevice(torch.device("cpu"), pin=False)
    file = FileWriter(path, {"a": (torch.uint8, (numel,))}, link)
    file._arrival = FailedCopy()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        for piece in torch.zeros(numel, dtype=torch.uint8).split(50):
            file.write("a", piece)
        file.close()
    file.abandon()
    assert threading.active_count() == threads and file._fd == -1
