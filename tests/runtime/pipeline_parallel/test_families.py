"""Test that Hugging Face models whose layers ranks divide train as one process does, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs_package
from tests.runtime.model_parallel import Layout, assert_equals_one_process, assert_resumes_under

pytestmark = needs_package("transformers")
LAYERS = {"num_hidden_layers": 4}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}


@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "parallel", "stages", "section", "changes"),
    [
        (["llama"], 2, {"pipeline": 2}, [0], {"schedule": "gpipe"}, {}),
        (["mixtral", "gemma"], 4, {"pipeline": 2}, [1], {"schedule": "1f1b"}, {}),
        (["gpt2"], 2, {"pipeline": 2}, [1], {"schedule": "interleaved"}, {}),
        (["qwen3"], 4, {"pipeline": 4}, [1], {}, {**WINDOWS, "tie_word_embeddings": True}),
        (["llama"], 2, {"pipeline": 2}, [1], {"partition": [1]}, {}),
        (["mixtral"], 8, {"pipeline": 2, "tensor": 2, "sequence": 2}, [1], {}, {}),
        (["mixtral"], 8, {"pipeline": 2, "expert": 2, "sequence": 2}, [1], {}, {}),
    ],
    ids=["gpipe", "1f1b", "interleaved", "tied and windows", "partition", "three axes", "experts"],
)
def test_training_equals_one_process(
    families: list[str],
    world: int,
    parallel: dict[str, int],
    stages: list[int],
    section: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    assert_equals_one_process(
        families, world, stages, parallel, changes={**LAYERS, **changes}, pipeline=section
    )


LAYOUTS = [
    Layout(1, {}, 0),
    Layout(2, {"pipeline": 2}, 0),
    Layout(4, {"pipeline": 2}, 1),
    Layout(4, {"pipeline": 2, "tensor": 2}, 1),
    Layout(4, {"pipeline": 2, "sequence": 2}, 0),
    Layout(4, {"tensor": 2}, 3),
    Layout(4, {"pipeline": 4}, 1),
    Layout(4, {"sequence": 2}, 2),
]


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "saved",
    [pytest.param(3, marks=pytest.mark.exhaustive), 5, 2],
    ids=["stages and tensor", "tensor", "stages"],
)
def test_a_checkpoint_resumes_under_any_layout(tmp_path: Path, saved: int) -> None:
    others = LAYOUTS if saved == 3 else LAYOUTS[:3]
    changes = {**LAYERS, "tie_word_embeddings": True}
    assert_resumes_under(tmp_path, LAYOUTS[saved], others, "qwen3", changes=changes)
