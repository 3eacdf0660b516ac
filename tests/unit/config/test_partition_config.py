"""Test what ``tensor_parallel.partition_config`` means, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from zlaunch.runtime.config import ConfigError, load
from zlaunch.runtime.config.partition_config import read_partition_config


def _styles(*specs: dict[str, Any], model_type: str = "llama", **more: Any) -> list[str | None]:
    found = read_partition_config({"layer_specs": list(specs), **more})
    return [found.style_of(f"model.layers.0.{name}.weight", model_type) for name in ("up", "down", "gate")]


def test_the_first_spec_that_matches_counts() -> None:
    up = {"patterns": [".*\\.up\\.weight$"], "partition_type": "COLUMN"}
    down = {"patterns": [".*\\.none$", ".*\\.down\\.weight"], "partition_type": "row", "partition_dim": 1}
    rest = {"patterns": [".*"], "partition_type": "skip"}
    assert _styles(up, down, rest) == ["colwise", "rowwise", "replicate"]
    assert _styles(rest, up) == ["replicate"] * 3
    assert _styles({"patterns": ["layers"]}) == [None] * 3, "from the beginning of a name"
    assert (
        _styles({**rest, "grad_allreduce": True}, use_default_specs=False)[0]
        == "replicated_with_grad_allreduce"
    )
    assert _styles({**up, "gather_output": True})[0] == "colwise_gather_output"
    assert _styles({**up, "shape": [2, -1], "partition_dim": 0})[0] == "packed_colwise"
    assert _styles({**up, "model_types": ["Qwen2"]}) == [None] * 3
    assert _styles({**up, "model_types": ["LLAMA"]})[0] == "colwise"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "layer_specs: expected a list of specs"),
        ({"layer_specs": [{}], "strict": True}, "strict: unknown key"),
        ({"layer_specs": [{"partition_type": "row"}]}, "layer_specs[0]: expected an object with patterns"),
        ({"layer_specs": [{"patterns": ["("]}]}, "layer_specs[0].patterns: missing )"),
        ({"layer_specs": [{"patterns": ["a"], "type": "row"}]}, "layer_specs[0].type: unknown key"),
        (
            {"layer_specs": [{"patterns": ["a"], "partition_type": "diagonal"}]},
            "'diagonal' is not one of column",
        ),
        (
            {"layer_specs": [{"patterns": ["a"], "shape": [3, -1]}]},
            "layer_specs[0].shape: [3, -1] is not supported",
        ),
        (
            {"layer_specs": [{"patterns": ["a"], "partition_dim": 1}]},
            "partition_dim: 1 is not supported for column",
        ),
    ],
)
def test_what_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 1, "tensor_parallel": {"partition_config": section}})
    (line,) = caught.value.problems
    assert line.startswith("<dict>: tensor_parallel.partition_config: ") and said in line


def test_it_excludes_a_plan() -> None:
    with pytest.raises(ConfigError, match=r"partition_config: contradicts tensor_parallel\.plan"):
        load({"tensor_parallel": {"plan": {}, "partition_config": {"layer_specs": [{"patterns": ["a"]}]}}})
