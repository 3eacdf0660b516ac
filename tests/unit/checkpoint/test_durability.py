"""Test that a checkpoint is on the disk before it gets its name: a power cut loses what was not synced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from zlaunch.runtime.checkpoint.format.commit import put_in_place, replace_file, sync_folder, write_manifest
from zlaunch.runtime.checkpoint.format.files import FileWriter
from zlaunch.runtime.checkpoint.format.manifest import MANIFEST
from zlaunch.runtime.offload.transfer import HostLink


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced and renamed, in that order, by the last part of its path."""
    found: list[str] = []
    own = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        found.append(
            f"sync {os.path.basename(path)} {os.fstat(fd).st_size if os.path.isfile(path) else ''}".strip()
        )
        own["fsync"](fd)

    def renamed(name: str) -> Any:
        def rename(source: Any, target: Any) -> None:
            found.append(f"name {os.path.basename(target)}")
            own[name](source, target)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renamed(name))
    return found


def test_a_file_of_tensors_is_synced_when_it_is_whole(tmp_path: Path, calls: list[str]) -> None:
    value = torch.arange(3000)
    file = FileWriter(tmp_path / "f", {"v": (value.dtype, (3000,))}, HostLink(torch.device("cpu"), pin=False))
    file.write("v", value)
    size = file.close()["bytes"]
    assert calls == [f"sync f {size}"] and size == (tmp_path / "f").stat().st_size


def test_a_manifest_is_synced_with_its_content(tmp_path: Path, calls: list[str]) -> None:
    write_manifest(tmp_path, {"parameters": {}}, {}, {})
    assert calls == [f"sync {MANIFEST} {(tmp_path / MANIFEST).stat().st_size}"]


def test_a_checkpoint_is_synced_before_and_after_it_gets_its_name(tmp_path: Path, calls: list[str]) -> None:
    written, final = tmp_path / "written", tmp_path / "step1"
    written.mkdir()
    put_in_place(written, final)
    assert calls == ["sync written", "name step1", f"sync {tmp_path.name}"]


def test_a_small_file_is_synced_before_it_replaces_another(tmp_path: Path, calls: list[str]) -> None:
    replace_file(tmp_path / "latest", b"step1")
    assert [call.split()[0] for call in calls] == ["sync", "name"]
    assert calls[0].endswith(" 5") and calls[1] == "name latest"
    sync_folder(tmp_path)
    assert calls[-1] == f"sync {tmp_path.name}"
