"""Test that `--dry_run` draws the mesh of ranks, and says what crosses nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import run


@pytest.mark.parametrize(
    ("hosts", "crossing"),
    [
        ("a slots=4\nb slots=4\n", []),
        ("a slots=3\nb slots=5\n", ["between nodes at data 0, expert 1", "to their experts at data 0"]),
    ],
    ids=["fits", "crosses"],
)
def test_the_mesh_is_drawn(tmp_path: Path, hosts: str, crossing: list[str]) -> None:
    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "train.py").write_text("import zlaunch\n")
    config = {"train_batch_size": 8, "parallel": {"tensor": 2, "expert": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    launch = run(tmp_path, "--dry_run", "--hostfile", "hosts", "train.py", "--config", "ds.json")
    assert "mesh: data 2 * expert 2 * tensor 2" in launch.out
    rows = [line for line in launch.out.splitlines() if line.startswith("│ data 1, expert 0")]
    assert len(rows) == 1 and "rank 4 on b" in rows[0] and "rank 5 on b" in rows[0]
    warnings = [line for line in launch.out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == len(crossing)
    assert all(text in line for text, line in zip(crossing, warnings, strict=True))
