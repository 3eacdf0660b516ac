"""Files of tensors: readable by others, in ranges, and never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from zlaunch.runtime.checkpoint import files
from zlaunch.runtime.checkpoint.files import (
    NAMES,
    CheckpointError,
    Checksums,
    FileReader,
    FileWriter,
)

DTYPES = list(NAMES)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Checksums:
    path.unlink(missing_ok=True)
    writer = FileWriter(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    for name, value in tensors.items():
        writer.write(name, value)
    return writer.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=2)), min_size=0, max_size=6
    )
)
def test_the_safetensors_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    tensors = {f"t{i}": tensor(dtype, *shape) for i, (dtype, shape) in enumerate(shapes)}
    sums = write(path, tensors)
    assert sums.nbytes == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read
    )
    reader = FileReader(path, Checksums.from_json(sums.as_json()))
    reader.verify()
    for name, value in tensors.items():
        assert reader.shape(name) == tuple(value.shape)
        assert torch.equal(reader.read(name).view(value.shape), value)
    reader.close()


@given(start=st.integers(0, 3000), length=st.integers(0, 3000))
@settings(max_examples=40, deadline=None)
def test_ranges(tmp_path_factory: pytest.TempPathFactory, start: int, length: int) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    value = torch.arange(3000, dtype=torch.float32)
    sums = write(path, {"before": torch.ones(7, dtype=torch.uint8), "value": value})
    reader = FileReader(path, sums)
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
            FileReader(path, sums).verify()
    for length in (0, 1, 8, 4096, len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"x")[:length])
        with pytest.raises(CheckpointError, match=r"not whole"):
            FileReader(path, sums)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        FileReader(path, sums)


def test_damage_elsewhere_does_not_keep_a_part_from_being_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    value = torch.arange(5000, dtype=torch.float32)
    sums = write(path, {"value": value})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = FileReader(path, sums)
    assert torch.equal(reader.read("value", 0, 100), value[:100])
    with pytest.raises(CheckpointError, match="damaged between bytes"):
        reader.read("value", 4990, 5000)
    reader.close()


def test_it_does_not_write_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        FileWriter(path, {})
    assert path.read_text() == "somebody's"
