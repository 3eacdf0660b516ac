"""Test in which order a save reaches the disk: what a name leads to is there before the name is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.checkpoint.format.manifest import LATEST, MANIFEST, WHOLE

Step = tuple[int, int, str, str]
"""When (nanoseconds since boot, on the one clock of all processes), the rank, what, and of which file."""


def _recorded(folder: str) -> list[Step]:
    """Save twice; return this rank's syncs and renames of the second save."""
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 4))
    train_engine(engine, batches(1, 8))
    engine.save_checkpoint(folder, tag="first")
    rank = int(os.environ["RANK"])
    found: list[Step] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def note(what: str, path: Any) -> None:
        found.append((time.monotonic_ns(), rank, what, os.path.relpath(path, folder)))

    def noted_sync(fd: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        sync(fd)
        note("synced", path)

    def noted_rename(source: Any, target: Any) -> None:
        note("renamed", target)
        rename(source, target)

    def noted_replace(source: Any, target: Any) -> None:
        note("renamed", target)
        replace(source, target)

    os.fsync, os.rename, os.replace = noted_sync, noted_rename, noted_replace  # type: ignore[assignment]
    try:
        engine.save_checkpoint(folder, tag="second")
    finally:
        os.fsync, os.rename, os.replace = sync, rename, replace
    engine.destroy()
    return found


def test_a_save_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """A machine that loses its power at any moment leaves a checkpoint with all of its content, or none."""
    steps = sorted(step for found in run_workers(_recorded, 2, str(tmp_path)) for step in found)
    [temporary] = {name.partition("/")[0] for _, _, _, name in steps if name.startswith(".second")}
    files = [f"{temporary}/{name}" for name in ("rank_00000.safetensors", "rank_00001.safetensors", WHOLE)]
    order = [(what, name.partition(".latest.")[1] or name) for _, _, what, name in steps]
    assert sorted(order[:3]) == sorted(("synced", name) for name in files), "every file, once"
    assert order[3:] == [
        ("synced", f"{temporary}/{MANIFEST}"),
        ("synced", temporary),  # the names of the files in it
        ("renamed", "second"),
        ("synced", "."),
        ("synced", ".latest."),
        ("renamed", LATEST),
        ("synced", "."),
    ]
