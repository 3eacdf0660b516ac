"""Test that mixtures whose experts are on different ranks train as one process does, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.needs import needs_package
from tests.runtime.tensor_parallel.families import make, plain, shapes, train
from tests.runtime.tensor_parallel.task import TOLERANCE, distance, settings
from tests.runtime.workers import join, run_workers

pytestmark = needs_package("transformers")


def _config(stage: int, tensor: int, expert: int, **changes: Any) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    return settings(
        stage, tensor, world // tensor, **{"parallel": {"tensor": tensor, "expert": expert}, **changes}
    )


def _train(
    families: list[str], tensor: int, expert: int, stages: list[int], changes: dict[str, Any]
) -> dict[Any, tuple[float, float]]:
    join()
    worst = {}
    for family in families:
        losses, wanted = plain(make(family, **changes))
        for stage in stages:
            engine, *_ = zlaunch.initialize(
                model=make(family, **changes), config=_config(stage, tensor, expert)
            )
            own = train(engine, tensor)
            worst[family, stage] = (
                distance(engine.module.state_dict(), wanted),
                max(abs(a - b) for a, b in zip(own, losses, strict=True)),
            )
            engine.destroy()
    return worst


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "tensor", "expert", "stages", "changes"),
    [
        (["qwen3_moe"], 4, 1, 2, [0, 1, 2, 3], {}),
        (["mixtral", "deepseek_v2", "gpt_oss"], 4, 1, 4, [3], {}),
        (["mixtral", "qwen3_moe"], 4, 2, 2, [3], {}),
        (["qwen3_moe"], 8, 2, 2, [3], {"tie_word_embeddings": True}),
        (["qwen3_moe"], 2, 1, 2, [3], {"num_experts": 8, "num_experts_per_tok": 1}),
    ],
    ids=["stages", "all ranks", "tensor", "three axes", "one expert"],
)
def test_training_equals_one_process(
    families: list[str], world: int, tensor: int, expert: int, stages: list[int], changes: dict[str, Any]
) -> None:
    for worst in run_workers(_train, world, families, tensor, expert, stages, changes):
        assert len(worst) == len(families) * len(stages)
        for case, errors in worst.items():
            assert max(errors) < TOLERANCE, (case, errors)


def _resume(folder: str, tensor: int, expert: int, stage: int, first: bool) -> list[float]:
    join()
    engine, *_ = zlaunch.initialize(model=make("qwen3_moe"), config=_config(stage, tensor, expert))
    if first:
        losses = train(engine, tensor, last=2)
        engine.save_checkpoint(folder)
        return losses + train(engine, tensor, first=2)
    assert engine.load_checkpoint(folder)[0] is not None
    return train(engine, tensor, first=2)


LAYOUTS = [
    *((1, 1, 1, 0), (2, 1, 1, 3), (2, 1, 2, 1), (4, 1, 2, 3), (4, 1, 4, 2)),
    *((4, 2, 2, 3), (4, 2, 1, 0), (2, 1, 2, 0)),
]
"""World size, tensor ranks, expert ranks and stage."""


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "others"), [((4, 2, 2, 3), LAYOUTS), ((4, 1, 2, 0), LAYOUTS[-2:])], ids=["sharded", "stage 0"]
)
def test_a_checkpoint_resumes_under_any_layout(
    saved: tuple[int, int, int, int], others: list[tuple[int, int, int, int]], tmp_path: Any
) -> None:
    world, *layout = saved
    losses = run_workers(_resume, world, str(tmp_path), *layout, True)[0]
    for other_world, *other in others:
        if (other_world, *other) == saved:
            continue
        resumed = run_workers(_resume, other_world, str(tmp_path), *other, False)[0]
        assert resumed == pytest.approx(losses[2:], abs=TOLERANCE), (other_world, other)


@pytest.mark.exhaustive
def test_an_export_is_whole(tmp_path: Any) -> None:
    run_workers(_resume, 4, str(tmp_path), 2, 2, 3, True)
    from zlaunch.runtime.checkpoint.export.full_weights import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    wanted = run_workers(_whole_shapes, 1)[0]
    assert {name: tuple(value.shape) for name, value in state.items()} == wanted


def _whole_shapes() -> dict[str, tuple[int, ...]]:
    join()
    return shapes("qwen3_moe")


def _variant(kind: str, expert: int, folder: str) -> list[float]:
    join()
    config = _config(3, 1, expert)
    offloaded = {"device": "cpu"}
    if kind == "offload":
        config["zero_optimization"] |= {"offload_optimizer": offloaded, "offload_param": offloaded}
    if kind == "disk":
        config["zero_optimization"] |= {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    model = make("mixtral")
    if kind == "recomputation":
        model.gradient_checkpointing_enable()
        model.train()
    if kind == "adapters":
        import peft

        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).double()
    if kind == "frozen":
        for parameter in model.model.embed_tokens.parameters():
            parameter.requires_grad_(False)
        for layer in model.model.layers[:1]:
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_("experts" in name)
    engine, *_ = zlaunch.initialize(model=model, config=config)
    return train(engine, 1)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["offload", "disk", "recomputation", "frozen", "adapters"])
def test_what_else_the_runtime_does_goes_with_it(kind: str, tmp_path: Any) -> None:
    wanted = run_workers(_variant, 1, kind if kind in ("frozen", "adapters") else "plain", 1, str(tmp_path))[
        0
    ]
    found = run_workers(_variant, 4, kind, 2, str(tmp_path))[0]
    assert found == pytest.approx(wanted, abs=TOLERANCE)


def _handles() -> dict[str, Any]:
    join()
    model = make("qwen3_moe")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = zlaunch.initialize(model=model, config=_config(3, 1, 2))
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
        zlaunch.initialize(model=make(family), config=_config(0, 1, expert, **changes))
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
