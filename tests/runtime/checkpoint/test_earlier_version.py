"""Check that checkpoints of an earlier version (tests/data/checkpoints) load, and that training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zlaunch
from tests.data.checkpoints.make import CASES, SAVED_AT, Model, build, state_of, train
from tests.runtime.workers import run_workers

MADE = Path(__file__).parents[2] / "data" / "checkpoints"

ON = [(2, 3), (1, 1), (1, 0), (3, 2)]
"""World sizes and stages to load at; those of the saves are among them."""


def _goes_on(folder: str, stage: int, dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any, Any]:
    """Returns the state after a load, the weights that the model computes with, the client state with the
    counters, and what followed.
    """
    engine = build(stage, dtype, seed=1)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    state = state_of(engine.module)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    facts = client, engine.global_steps, engine.global_samples
    following = train(engine, SAVED_AT, 2 * SAVED_AT)
    engine.destroy()
    return state, weights, facts, following


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("world", "stage"), ON)
@pytest.mark.parametrize("case", CASES)
def test_loads_and_goes_on(case: str, world: int, stage: int) -> None:
    _, saved_by, dtype = CASES[case]
    expected = load_file(MADE / case / "expected.safetensors")
    after = json.loads((MADE / case / "expected.json").read_text())
    torch.manual_seed(0)
    untrained = Model().state_dict()
    for rank, (state, weights, facts, following) in enumerate(
        run_workers(_goes_on, world, str(MADE / case), stage, dtype)
    ):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        for name, value in weights.items():  # frozen ones are as they began
            trained = "embedding.weight/value" if name == "head.weight" else f"{name}/value"
            want = expected[trained] if trained in expected else untrained[name]
            assert torch.equal(value, want.to(value.dtype)), name
        client, steps, samples = facts
        assert client["note"] == ("hello", 2.5) and torch.equal(client["tensor"], torch.arange(3))
        assert client["rank"] == (rank if world == saved_by else 0)
        assert (steps, samples) == (SAVED_AT, SAVED_AT * 12)
        assert following["rates"] == pytest.approx(after["rates"])
        assert following["losses"] == pytest.approx(after["losses"], rel=2e-2 if dtype == "bf16" else 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_becomes_plain_weights(case: str) -> None:
    expected = load_file(MADE / case / "expected.safetensors")
    whole = zlaunch.get_fp32_state_dict_from_zero_checkpoint(MADE / case)
    assert whole.keys() == Model().state_dict().keys()
    for name, value in expected.items():
        parameter, _, kind = name.partition("/")
        assert kind != "value" or torch.equal(whole[parameter], value), name
