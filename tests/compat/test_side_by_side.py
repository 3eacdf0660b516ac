"""The same DeepSpeed script under the real DeepSpeed 0.19.8 (recorded, see record.py) and under zlaunch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import run

HERE = Path(__file__).parent
TOLERANCE = 1e-5


def differences(real: Any, ours: Any, path: str = "") -> list[str]:
    if isinstance(real, dict):
        assert real.keys() == ours.keys(), path
        return [line for key in real for line in differences(real[key], ours[key], f"{path}/{key}")]
    if isinstance(real, list):
        assert len(real) == len(ours), path
        return [
            line
            for i, (a, b) in enumerate(zip(real, ours, strict=True))
            for line in differences(a, b, f"{path}/{i}")
        ]
    if isinstance(real, float):
        return [f"{path}: {real} {ours}"] if abs(real - ours) > TOLERANCE * max(1.0, abs(real)) else []
    return [f"{path}: {real} {ours}"] if real != ours else []


@pytest.mark.parametrize("world", [1, 2])
def test_it_says_the_same(tmp_path: Path, world: int) -> None:
    """Losses, gradients, norms, masters, moments, rates and counters, at stages 0 to 3."""
    out = tmp_path / "out.json"
    script = str(HERE / "side_by_side.py")
    launch = run(tmp_path, "--num_gpus", str(world), "--no_local_rank", script, str(out))
    assert out.exists(), launch.err
    real = json.loads((HERE / f"deepspeed_{world}.json").read_text())
    assert set(real[0]) == {"0", "1", "2", "3"} and len(real) == world
    assert differences(real, json.loads(out.read_text())) == []
