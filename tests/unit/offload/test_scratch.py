"""Test files and folders on a drive that processes share, and the buffers that writes to them use."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from zlaunch.runtime.errors import DiskError
from zlaunch.runtime.offload.disk import ALIGN_BYTES, ScratchFile, ScratchFolder, sweep
from zlaunch.runtime.offload.stores import BufferRing
from zlaunch.runtime.offload.transfer import HostLink


def test_what_is_reserved_begins_at_a_block(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path / "f")
    wanted = [0, 2 * ALIGN_BYTES, 3 * ALIGN_BYTES, 4 * ALIGN_BYTES]
    assert [file.reserve(nbytes) for nbytes in (ALIGN_BYTES + 1, 1, ALIGN_BYTES, 10)] == wanted
    assert os.path.getsize(file.path) == file.reserved_bytes == 5 * ALIGN_BYTES
    file.check()
    os.truncate(file.path, 4 * ALIGN_BYTES)
    with pytest.raises(DiskError, match="another process truncated it"):
        file.check()
    file.close()


def test_a_sweep_takes_what_dead_processes_have_left(tmp_path: Path) -> None:
    """A folder without a lock may be one that is being made; it stays until it is old."""
    names = ("dead", "alive", "new", "old")
    folders = {name: tmp_path / f"zlaunch-here-rank0-{name}" for name in names}
    other = tmp_path / "zlaunch-there-rank0-dead"
    for folder in (*folders.values(), other):
        folder.mkdir()
    for name in ("dead", "alive"):
        (folders[name] / "lock").touch()
    (other / "lock").touch()
    os.utime(folders["old"], (time.time() - 86400,) * 2)
    with open(folders["alive"] / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sorted(sweep(tmp_path, "here")) == [folders["dead"], folders["old"]]
    assert sorted(tmp_path.iterdir()) == sorted([folders["alive"], folders["new"], other])


def test_a_folder_is_locked_while_it_is_used(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path, 3)
    host = folder.path.name.removeprefix("zlaunch-").partition("-rank3-")[0]
    assert sweep(tmp_path, host) == [] and folder.path.is_dir()
    folder.remove()
    assert not folder.path.exists()


class Write:
    """A write to disk that ends when somebody waits for it, perhaps with an error."""

    def __init__(self, error: DiskError | None = None) -> None:
        self.done, self._error = False, error

    def wait(self) -> None:
        self.done = True
        if self._error is not None:
            raise self._error


@pytest.fixture
def ring() -> BufferRing:
    made = BufferRing(HostLink(torch.device("cpu"), pin=False), 2)
    made.fit(4096)
    return made


def test_a_buffer_is_lent_again_when_it_has_been_written(ring: BufferRing) -> None:
    first, second = ring.take(), ring.take()
    assert first.data_ptr() != second.data_ptr() and not ring.spare
    writes: list[Any] = [Write(), Write()]
    for buffer, write in zip((first, second), writes, strict=True):
        ring.give_back(buffer, write)
    assert not ring.spare and ring.take().data_ptr() == first.data_ptr()
    assert [write.done for write in writes] == [True, False]
    ring.drain()
    assert writes[1].done and ring.spare


def test_a_free_buffer_is_lent_before_one_that_is_being_written(ring: BufferRing) -> None:
    first, second = ring.take(), ring.take()
    write: Any = Write()
    ring.give_back(first, write)
    ring.give_back(second)
    assert ring.spare and ring.take().data_ptr() == second.data_ptr() and not write.done


def test_a_write_that_failed_is_raised_where_its_buffer_is_wanted(ring: BufferRing) -> None:
    buffers = [ring.take(), ring.take()]
    failed: Any = Write(DiskError(5, "the disk"))
    for buffer in buffers:
        ring.give_back(buffer, failed)
    with pytest.raises(DiskError, match="the disk"):
        ring.take()
    with pytest.raises(DiskError, match="the disk"):
        ring.drain()
    assert {ring.take().data_ptr(), ring.take().data_ptr()} == {buffer.data_ptr() for buffer in buffers}
