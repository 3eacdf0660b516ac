"""Test how scripts for accelerate save a Transformers model that is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.needs import needs_package
from tests.runtime.model_parallel import make
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed import engine as alias

pytestmark = needs_package("transformers")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _saved(folder: str, is_positional: bool) -> list[dict[str, torch.Tensor]]:
    """Save with rank 0's state as accelerate does, train, and save without; return the state of each time."""
    rank = join()
    engine: Any
    engine, *_ = alias.initialize(model=make("llama"), config=CONFIG)
    tokens = torch.arange(16).view(2, 8) + rank

    def train() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    train()
    main = {"is_main_process": rank == 0}
    save = engine.module.save_pretrained  # before the state, as in one expression
    state = engine._zero3_consolidated_16bit_state_dict()
    if is_positional:
        save(f"{folder}/first", rank == 0, state)
    else:
        save(f"{folder}/first", state_dict=state, **main)
    states = [{name: value.clone() for name, value in engine.module.state_dict().items()}]
    train()
    engine.module.save_pretrained(f"{folder}/second", **main)
    states.append({name: value.clone() for name, value in engine.module.state_dict().items()})
    engine.destroy()
    assert "save_pretrained" not in vars(engine.module)
    return states


@pytest.mark.rotated
@pytest.mark.parametrize("is_positional", [False, True])
def test_ranks_without_the_state_write_nothing_and_wait_for_nobody(
    tmp_path: Path, is_positional: bool
) -> None:
    from transformers import AutoModelForCausalLM

    (states, _) = run_workers(_saved, 2, str(tmp_path), is_positional)
    for name, state in zip(("first", "second"), states, strict=True):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found[key], value), key
    assert not all(torch.equal(states[0][key], states[1][key]) for key in states[0])
