"""Test `zlaunch bench net` on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_runs import zlaunch


@pytest.mark.exhaustive
def test_ranks_of_one_machine(tmp_path: Path) -> None:
    done = zlaunch(tmp_path, "bench", "net", "--num_gpus=3", "--size=1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["backend"] == "gloo" and found["links"] == [] and found["slow"] == []
    assert [node["ranks"] for node in found["nodes"]] == [[0, 1, 2]]
    assert [speed["op"] for speed in found["collectives"]] == ["all_gather", "reduce_scatter", "all_reduce"]
    for speed in found["collectives"]:
        assert speed["ranks"] == [0, 1, 2] and 0 < speed["buffer_bytes"] <= 2**20
        assert speed["latency_s"] > 0 and speed["bus_bytes_per_s"] > 0
    assert "measuring the collectives of 3 ranks" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_table(tmp_path: Path) -> None:
    done = zlaunch(tmp_path, "bench", "net", "--num_gpus=2", "--size=0.01")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "localhost" in line]
    assert [row[3] for row in rows] == ["all-gather", "reduce-scatter", "all-reduce"]


@pytest.mark.rotated
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "one rank has no network"),
        (["--hostfile", "none"], "none"),
        (["--size", "0"], "--size"),
        (["train.py"], "unexpected extra argument"),
        (["--launcher", "pigeon"], "pigeon"),
    ],
)
def test_mistakes(arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = zlaunch(tmp_path, "bench", "net", *arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("zlaunch-*"))


@pytest.mark.exhaustive
def test_workers_that_cannot_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    done = zlaunch(tmp_path, "bench", "net", "--num_gpus=2")
    assert done.returncode == 1 and done.stdout == "" and "failed first" in done.stderr
    (folder,) = tmp_path.glob("zlaunch-bench-net-*")
    assert (folder / "logs" / "rank_00000.log").exists()
