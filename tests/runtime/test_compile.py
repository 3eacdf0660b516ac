"""Test blocks that the config has compiled: they train as plain torch does, in one graph without breaks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import zlaunch
from tests.needs import needs_package
from tests.runtime.models import (
    batches,
    config,
    net,
    relative_error,
    train_engine,
    train_plain,
    with_forward,
)
from tests.runtime.workers import run_workers
from zlaunch.runtime.compile import compile_blocks
from zlaunch.runtime.config import ConfigError, load
from zlaunch.runtime.mesh import MeshShape

TOLERANCE = 1e-9
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "checkpointed at stage 0": {"stage": 0, "activation_checkpointing": {"enabled": True}},
    "checkpointed at stage 3": {"stage": 3, "activation_checkpointing": {"enabled": True}},
    "in host memory": {"stage": 3, "zero": HOST},
    "step in backward": {"stage": 3, "zero": {"step_in_backward": True}},
    "two passes": {"stage": 2, "accumulation": 2},
}


def _train(case: str, backend: str) -> dict[str, Any]:
    """Train plain torch and an engine; return the worst error, the graphs of one step and of all, breaks."""
    zlaunch.init_distributed()
    given = dict(CASES[case])
    accumulation = given.get("accumulation", 1)
    torch._dynamo.reset()
    counters.clear()
    data = batches(4, 4 * accumulation)
    plain: Any = net().double()
    model: Any = net().double()
    model.load_state_dict(plain.state_dict())
    train_plain(plain, data)
    section = {"enabled": True, "backend": backend}
    world = torch.distributed.get_world_size()
    engine, *_ = zlaunch.initialize(
        model=model, config=config(micro=4 // world, compile=section, **{"accumulation": 1, **given})
    )
    train_engine(engine, data[:1])
    first = counters["stats"]["unique_graphs"]
    train_engine(engine, data[1:])
    state = engine.module.state_dict() if given["stage"] < 3 else model.state_dict()
    error = max(relative_error(state[name], value) for name, value in plain.state_dict().items())
    found: dict[str, Any] = {"error": error, "first": first, "last": counters["stats"]["unique_graphs"]}
    found["breaks"] = dict(counters["graph_break"])
    engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_train_like_plain_torch(case: str) -> None:
    for found in run_workers(_train, 2, case, "aot_eager"):
        assert found["error"] <= TOLERANCE, found
        assert found["breaks"] == {} and found["first"] == found["last"] == 1, found


@pytest.mark.needs("g++")
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["stage 0", "stage 3", "checkpointed at stage 3"])
def test_the_default_backend(case: str) -> None:
    for found in run_workers(_train, 2, case, "inductor"):
        assert found["error"] <= TOLERANCE and found["breaks"] == {} and found["last"] == 1, found


def _hugging_face() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    zlaunch.init_distributed()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 64, (1, 8))
    losses = {}
    for enabled in (False, True):
        torch.manual_seed(1)
        section = {"enabled": enabled, "backend": "aot_eager"}
        engine, *_ = zlaunch.initialize(model=LlamaForCausalLM(sizes), config=config(3, 1, compile=section))
        losses[enabled] = [_one_step(engine, tokens) for _ in range(3)]
        engine.destroy()
    return {"losses": losses, "graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"]}


def _one_step(engine: Any, tokens: Any) -> float:
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.exhaustive
@needs_package("transformers")
def test_layers_of_a_hugging_face_model_share_a_graph() -> None:
    """Each has its number, by which it would find its KV cache: dynamo gives up after 8 graphs."""
    for found in run_workers(_hugging_face, 2):
        assert found["graphs"] == 1 and not found["breaks"], found
        assert found["losses"][True] == pytest.approx(found["losses"][False], rel=1e-5)


def _divided() -> list[str]:
    """Train a divided block that the script has compiled; return the files that dynamo has compiled."""
    zlaunch.init_distributed()
    torch._dynamo.reset()
    clear_compilation_metrics()
    model: Any = net()
    for layer in model.layers:
        layer.compile(backend="eager")
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 1, zero={"stage3_unit_size": 700}))
    train_engine(engine, batches(2, 2))
    engine.destroy()
    return [str(each.co_filename) for each in get_compilation_metrics()]


def test_hooks_between_the_parts_of_a_divided_block_are_not_compiled() -> None:
    """dynamo compiled the frame that all hooks share for each of them, and warned of the ninth."""
    runtime = str(Path(zlaunch.runtime.__file__).resolve().parent)
    for files in run_workers(_divided, 2):
        assert any(file.endswith("models.py") for file in files), files
        assert not [file for file in files if str(Path(file).resolve()).startswith(runtime)], files


def _initialize(model: nn.Module, **section: Any) -> Any:
    given = {"enabled": True, "backend": "eager", **section}
    return zlaunch.initialize(model=model, config=config(0, 1, compile=given))[0]


def test_a_copy_of_a_block_has_its_own_plain_forward() -> None:
    model: Any = net()
    engine = _initialize(model)
    block = model.layers[0]
    x = torch.randn(1, 2, 24)
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not torch.equal(other(x), block(x))
    engine.destroy()


def test_what_cannot_be_compiled_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    flat = with_forward(nn.Linear(4, 4), lambda x: x)
    with pytest.raises(ConfigError, match=r"compile.enabled: found no blocks to compile \(members of a Mod"):
        _initialize(flat)
    with pytest.raises(
        ConfigError, match=r"compile.backend: unknown backend 'inducter'; torch has .*inductor"
    ):
        _initialize(net(), backend="inducter")
    with pytest.raises(ConfigError, match=r"compile.kwargs: set the backend in compile.backend"):
        _initialize(net(), kwargs={"backend": "inductor"})
    with pytest.raises(ConfigError, match=r"compile.kwargs: torch.compile rejects them: .*modes"):
        _initialize(net(), kwargs={"modes": "default"})
    model: Any = net()
    model.layers[0].compile(backend="eager")
    capsys.readouterr()
    _initialize(model).destroy()
    assert "compile: 1 blocks are compiled by the script and stay as they are" in capsys.readouterr().out


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_next_engine_compiles_as_its_own_config_says(checkpointed: bool) -> None:
    model: Any = net()
    inputs = torch.zeros(1, 6, dtype=torch.long)
    recompute: dict[str, Any] = {"activation_checkpointing": {"enabled": True}} if checkpointed else {}
    graphs = []
    for section in (
        {"enabled": True, "backend": "eager"},
        {"enabled": False},
        {"enabled": True, "backend": "aot_eager"},
    ):
        torch._dynamo.reset()
        counters.clear()
        engine = zlaunch.initialize(model=model, config=config(0, 1, compile=section, **recompute))[0]
        engine.backward(engine(inputs).sum())
        graphs.append((counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"] > 0))
        engine.destroy()
    assert graphs == [(1, False), (0, False), (1, True)]


@pytest.mark.parametrize("axis", ["tensor", "sequence", "expert", "pipeline"])
def test_ranks_that_share_layers_are_rejected(axis: str) -> None:
    given = config(0, 1, compile={"enabled": True}, parallel={axis: 2})
    with pytest.raises(ConfigError, match=f"compile.enabled: is not supported together with {axis} parall"):
        zlaunch.initialize(model=net(), config=given)
    with pytest.raises(ConfigError, match=f"compile.enabled: does not go with parallel.{axis} above 1"):
        compile_blocks(net(), load(given | {"parallel": {}}).config.compile, MeshShape(**{axis: 2}))
