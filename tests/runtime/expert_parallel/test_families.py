"""Test that mixtures whose experts are on different ranks train as one process does, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import (
    Layout,
    assert_equals_one_process,
    assert_exports_whole_tensors,
    assert_resumes_under,
    assert_variants_train_alike,
    config_of,
    make,
)
from tests.runtime.workers import join, run_workers

pytestmark = needs_package("transformers")


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "parallel", "stages", "changes"),
    [
        (["qwen3_moe"], 4, {"expert": 2}, [0, 1, 2, 3], {}),
        (["mixtral", "deepseek_v2", "gpt_oss"], 4, {"expert": 4}, [3], {}),
        (["mixtral", "qwen3_moe"], 4, {"tensor": 2, "expert": 2}, [3], {}),
        (["qwen3_moe"], 8, {"tensor": 2, "expert": 2}, [3], {"tie_word_embeddings": True}),
        (["qwen3_moe"], 2, {"expert": 2}, [3], {"num_experts": 8, "num_experts_per_tok": 1}),
    ],
    ids=["stages", "all ranks", "tensor", "three axes", "one expert"],
)
def test_training_equals_one_process(
    families: list[str], world: int, parallel: dict[str, int], stages: list[int], changes: dict[str, Any]
) -> None:
    assert_equals_one_process(families, world, stages, parallel, attention="eager", changes=changes)


SHARDED = Layout(4, {"tensor": 2, "expert": 2}, 3)
LAYOUTS = [
    Layout(1, {}, 0),
    Layout(2, {}, 3),
    Layout(2, {"expert": 2}, 1),
    Layout(4, {"expert": 2}, 3),
    Layout(4, {"expert": 4}, 2),
    Layout(4, {"tensor": 2}, 0),
    Layout(2, {"expert": 2}, 0),
]


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "others"),
    [(SHARDED, LAYOUTS), (Layout(4, {"expert": 2}, 0), LAYOUTS[-2:])],
    ids=["sharded", "stage 0"],
)
def test_a_checkpoint_resumes_under_any_layout(saved: Layout, others: list[Layout], tmp_path: Path) -> None:
    assert_resumes_under(tmp_path, saved, others, "qwen3_moe", attention="eager")


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
def test_an_export_is_whole(tmp_path: Path) -> None:
    assert_exports_whole_tensors(tmp_path, SHARDED, "qwen3_moe", attention="eager")


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["offload", "disk", "recomputation", "frozen", "adapters"])
def test_what_else_the_runtime_does_goes_with_it(kind: str, tmp_path: Path) -> None:
    assert_variants_train_alike(kind, "mixtral", 4, {"expert": 2}, tmp_path, attention="eager")


def _handles() -> dict[str, Any]:
    join()
    model = make("qwen3_moe")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = zlaunch.initialize(model=model, config=config_of(3, {"expert": 2}))
    experts = engine.module.get_submodule("model.layers.0.mlp.experts")
    state = engine.module.state_dict()
    found = {
        "part": tuple(experts.get_parameter("down_proj").shape),
        "count": experts.num_experts,
        "state": all(torch.equal(state[name], value) for name, value in wanted.items()),
    }
    engine.module.load_state_dict({name: value * 2 for name, value in wanted.items()})
    after = engine.module.state_dict()
    found["loaded"] = all(torch.equal(after[name], value * 2) for name, value in wanted.items())
    return found


def test_handles_give_whole_tensors() -> None:
    for found in run_workers(_handles, 2):
        assert found == {"part": (2, 32, 24), "count": 2, "state": True, "loaded": True}


def _refused(family: str, expert: int, changes: dict[str, Any]) -> str:
    join()
    try:
        zlaunch.initialize(model=make(family), config=config_of(0, {"expert": expert}, **changes))
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {}, "LlamaForCausalLM has no plan for expert parallelism"),
        (
            "mixtral",
            {"expert_parallel": {"experts": ["model.layers.*.mlp.expert"]}},
            "no module matches model.layers.*.mlp.expert, did you mean model.layers.*.mlp.experts?",
        ),
        (
            "mixtral",
            {"expert_parallel": {"experts": ["model.layers.*.self_attn"]}},
            "must be the experts, got",
        ),
    ],
    ids=["no plan", "no module", "no experts"],
)
def test_what_cannot_be_done_is_refused(family: str, changes: dict[str, Any], said: str) -> None:
    for found in run_workers(_refused, 2, family, 2, changes):
        assert said in found


@pytest.mark.exhaustive
def test_experts_that_cannot_be_divided_are_refused() -> None:
    for found in run_workers(
        _refused, 3, "mixtral", 3, {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}
    ):
        assert "the 4 experts of model.layers.0.mlp.experts cannot be divided by 3 ranks" in found
        assert "1, 2, 4" in found
