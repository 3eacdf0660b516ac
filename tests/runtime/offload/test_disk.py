"""Test the disk engine on real files: what it moves, and what it says when it cannot."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import LIMIT_S
from zlaunch.runtime.errors import DiskError
from zlaunch.runtime.offload.disk import (
    ALIGN_BYTES,
    DiskEngine,
    ScratchFile,
    ScratchFolder,
    aligned,
    aligned_buffer,
)


@settings(max_examples=30, deadline=None)
@given(
    pages=st.integers(1, 40),
    offset=st.integers(0, 9),
    block=st.sampled_from([1, 2, 5, 64]),
    threads=st.integers(1, 4),
)
def test_what_was_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, pages: int, offset: int, block: int, threads: int
) -> None:
    path = tmp_path_factory.mktemp("disk") / "file"
    engine = DiskEngine(block_bytes=block * ALIGN_BYTES, threads=threads)
    file = ScratchFile(path)
    data, back = aligned_buffer(pages * ALIGN_BYTES), aligned_buffer(pages * ALIGN_BYTES)
    data[:] = os.urandom(len(data))
    engine.write(file, data, offset * ALIGN_BYTES).wait()
    engine.read(file, back, offset * ALIGN_BYTES).wait()
    assert back == data and engine.read_bytes == engine.written_bytes == len(data)
    assert path.read_bytes()[offset * ALIGN_BYTES :] == bytes(data)
    file.close()
    engine.close()


def test_many_transfers_at_once(tmp_path: Path) -> None:
    engine, file = DiskEngine(block_bytes=ALIGN_BYTES, threads=4), ScratchFile(tmp_path / "file")
    buffers = [aligned_buffer(8 * ALIGN_BYTES) for _ in range(20)]
    for i, buffer in enumerate(buffers):
        buffer[:] = bytes([i]) * len(buffer)
    size = len(buffers[0])
    for transfer in [engine.write(file, buffer, i * size) for i, buffer in enumerate(buffers)]:
        transfer.wait()
    back = [aligned_buffer(size) for _ in buffers]
    for transfer in [engine.read(file, buffer, i * size) for i, buffer in enumerate(back)]:
        transfer.wait()
    assert back == buffers


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    engine, file = DiskEngine(), ScratchFile(tmp_path / "state.bin")
    file.reserve(16 * ALIGN_BYTES)
    os.truncate(tmp_path / "state.bin", 8 * ALIGN_BYTES)
    with pytest.raises(DiskError, match=r"state.bin: ends at byte 32768: another process truncated it"):
        engine.read(file, aligned_buffer(16 * ALIGN_BYTES)).wait()


def test_what_is_not_aligned_is_refused(tmp_path: Path) -> None:
    engine, file = DiskEngine(), ScratchFile(tmp_path / "file")
    with pytest.raises(ValueError, match="not aligned"):
        engine.write(file, aligned_buffer(ALIGN_BYTES)[:100])
    with pytest.raises(ValueError, match="not aligned"):
        engine.read(file, aligned_buffer(ALIGN_BYTES), 100)
    with pytest.raises(ValueError, match="block_size 1000"):
        DiskEngine(block_bytes=1000)
    assert aligned(1) == ALIGN_BYTES and aligned(0) == 0


def test_a_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"nowhere/file: cannot be opened: No such file or directory"):
        ScratchFile(tmp_path / "nowhere" / "file")


def test_a_file_system_without_o_direct_is_used_through_the_cache() -> None:
    path = Path(f"/dev/shm/zlaunch-test-{os.getpid()}")
    try:
        engine, file = DiskEngine(), ScratchFile(path)
        data, back = aligned_buffer(3 * ALIGN_BYTES), aligned_buffer(3 * ALIGN_BYTES)
        data[:] = os.urandom(len(data))
        engine.write(file, data).wait()
        engine.read(file, back).wait()
        assert back == data
    finally:
        path.unlink()


@pytest.mark.needs("root", "mounts")
def test_a_full_disk_is_said_before_and_during(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        engine, file = DiskEngine(), ScratchFile(tmp_path / "file")
        with pytest.raises(DiskError, match=r"no space left for [\d.]+ MiB: free space, or use") as caught:
            file.reserve(4 << 20)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(DiskError, match="no space left"):
            engine.write(file, aligned_buffer(4 << 20)).wait()
        file.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.exhaustive
def test_bench_io(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zlaunch", "bench", "io", str(tmp_path), "--size=0.01"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["measured"]) == 12 and all(row["read"] > 0 < row["write"] for row in found["measured"])
    assert found["aio"]["block_size"] in {row["block_size"] for row in found["measured"]}
    done = subprocess.run(
        [*command, "--params=7B", "--world_size=8"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert '"aio": {"block_size"' in done.stdout and "s a step" in done.stdout
    assert list(tmp_path.iterdir()) == []
    command[5] = str(tmp_path / "nowhere")
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "no such folder" in done.stderr


def test_the_home_folder_has_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = ScratchFolder("~/drive", rank=0)
    assert folder.path.parent == tmp_path / "drive"
    folder.remove()
