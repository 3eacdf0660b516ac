"""Test the functions that mark leaf modules, beside what DeepSpeed 0.19.8 returns and raises."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.test_engine import _deepspeed
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import run_workers


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.GELU())


def test_marks_return_and_raise_as_deepspeeds(deepspeed: Any) -> None:
    utils, model = deepspeed.utils, _model()
    inner: Any = model[1]
    first = inner[0]
    assert utils.set_z3_leaf_modules(model, [nn.Linear, "torch.nn.modules.activation.ReLU"]) == [
        *(model[0], first, inner[1])
    ]
    assert utils.set_z3_leaf_modules(inner, ["ReLU", nn.Module]) == [first, inner[1], inner]  # children first
    utils.set_z3_leaf_module(inner, False)
    assert utils.unset_z3_leaf_modules(model, ["Linear", "Conv1d"]) == [model[0], first]
    assert utils.get_z3_leaf_modules(model) == [inner[1]]
    assert utils.set_z3_leaf_modules(model, ["Conv1d"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="Conv1d"):
        utils.set_z3_leaf_modules(model, ["Conv1d"])
    with pytest.raises(TypeError, match="classes or class names, not int"):
        utils.set_z3_leaf_modules(model, [1])

    assert utils.set_z3_leaf_modules_by_name(model, ["1.0", "1"]) == ([first, inner], [])
    assert utils.set_z3_leaf_modules_by_name(model, [""], flag=False) == ([model], [])
    found = utils.set_z3_leaf_modules_by_name(model, ["1.0", "9"], flag=False, raise_if_not_found=False)
    assert found == ([first], ["9"]) and not utils.z3_leaf_module(first)
    with pytest.raises(ValueError, match=r"\['9'\]"):
        utils.set_z3_leaf_modules_by_name(model, ["1.0", "9"])

    assert utils.set_z3_leaf_modules_by_suffix(model, [".1", "1", "0"]) == (
        *([inner[1], inner, model[0], first], []),
    )
    found = utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"], flag=False, raise_if_not_found=False)
    assert found == ([model[0], first], ["x"])
    with pytest.raises(ValueError, match=r"\['x'\]"):
        utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"])

    utils.set_z3_leaf_module(model, True)
    assert utils.z3_leaf_module(model) and not utils.z3_leaf_module(nn.ReLU())
    assert utils.get_z3_leaf_modules(_model()) == []
    # a name alone is one entry, not its letters
    assert utils.set_z3_leaf_modules(_model(), "GELU") and utils.set_z3_leaf_modules(_model(), nn.GELU)
    assert utils.set_z3_leaf_modules_by_name(model, "1.0") == ([first], [])
    assert not utils.z3_leaf_parameter(first.weight)


def _leaf_root() -> tuple[list[str], list[bool], str]:
    """Train a model that is a leaf itself, beside plain torch; mark another module too late."""
    deepspeed = _deepspeed()
    plain, model = net().double(), net().double()
    deepspeed.utils.set_z3_leaf_module(model, True)
    given = config(3, 2, zero={"stage3_module_granularity_threshold": 0})
    given["zero_optimization"]["leaf_module"] = {"classes": "Nowhere", "names": ["head", "nowhere"]}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = deepspeed.initialize(model=model, config=given)[0]
        units = [unit.name for unit in engine.units]
        of_leaf = [deepspeed.utils.z3_leaf_parameter(p) for p in (model.head.weight, plain.head.weight)]
        deepspeed.utils.set_z3_leaf_modules_by_name(model, ["norm"])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    for batch in batches(3, 4):
        loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss_of(engine, batch.chunk(2)[engine.global_rank]))
        engine.step()
    engine.destroy()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-9)
    return units, of_leaf, said.getvalue()


def test_a_model_that_is_a_leaf_is_one_unit() -> None:
    results = run_workers(_leaf_root, 2)
    for rank, (units, of_leaf, said) in enumerate(results):
        assert units == ["root"] and of_leaf == [True, False]
        wanted = "leaf_module: no module of the model matches 'Nowhere', 'nowhere'"
        assert (wanted in said) is (rank == 0), said
        assert "Mixtral" not in said  # a default
        assert "marked after initialize" in said
