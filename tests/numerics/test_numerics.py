"""Train a rotating sample of the table: each turn other families, and of each of them other cells.

``python -m tests.numerics`` runs all of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.cell import (
    PRECISIONS,
    STAGES,
    WAYS,
    Cell,
    Record,
    Result,
    cells_of,
    compare_errors,
    errors_of,
    unequal,
)
from tests.numerics.families import FAMILIES
from tests.numerics.page import page
from tests.numerics.run import run_family
from tests.selection import TURNS


def sample(family: str, turn: int) -> list[Cell]:
    """Choose a cell of each precision; over all turns every stage and every way that the family has."""
    number = list(FAMILIES).index(family)
    chosen = []
    for position, precision in enumerate(PRECISIONS):
        mine = [cell for cell in cells_of(family) if cell.precision == precision]
        if not mine:
            continue
        ways = [way for way in WAYS if any(cell.way == way for cell in mine)]
        stage = STAGES[(turn + position) % len(STAGES)]
        way = ways[(number + turn + 2 * position) % len(ways)]
        chosen.append(Cell(family, precision, stage, way))
    return chosen


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_the_error_of_plain_torch(family: str, pytestconfig: pytest.Config) -> None:
    chosen = sample(family, pytestconfig.getoption("--turn"))
    results = list(run_family(chosen))
    wrong = [f"{cell}: {line}" for cell, result in results for line in result.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(results) == len(chosen)


@pytest.mark.rotated
def test_far_positions_in_bf16() -> None:
    """A fixed cell, for every turn: rounded buffers, sums or masters all show in it."""
    cell = Cell("llama", "bf16", 3, "plain")
    assert FAMILIES[cell.family].is_rotary
    ((_, result),) = run_family([cell])
    assert not result.wrong and result.equal


def test_the_turns_take_every_stage_of_each_precision() -> None:
    for family in FAMILIES:
        cells = [cell for turn in range(TURNS) for cell in sample(family, turn)]
        assert {(cell.precision, cell.stage) for cell in cells} == {
            (p, s) for p in PRECISIONS if p not in FAMILIES[family].not_in for s in STAGES
        }
        assert set(cells) <= set(cells_of(family))


def test_the_table_has_sixty_families() -> None:
    named = "llama qwen3 deepseek_v3 gpt_oss gemma3 mamba rwkv whisper clip vit t5 deberta jamba falcon bloom"
    assert len(FAMILIES) >= 60 and set(named.split()) <= set(FAMILIES)


def _record(**values: float) -> Record:
    tensors = {name: torch.tensor([value, 1.0], dtype=torch.float64) for name, value in values.items()}
    return Record([torch.tensor(1.0)], {f"step 0: {n}": v for n, v in tensors.items()}, tensors)


def test_an_error_may_be_a_tenth_larger_than_plain_torchs() -> None:
    for ours, is_wrong in ((1.0108, False), (1.0112, True)):
        result = Result()
        compare_errors(result, 0.0, _record(a=ours), _record(a=1.01), _record(a=1.0))
        assert bool(result.wrong) is is_wrong
        assert result.errors["weights"] == pytest.approx(((ours - 1) / math.sqrt(2), 0.01 / math.sqrt(2)))
        assert not result.equal
    result = Result()
    compare_errors(result, 0.0, _record(a=1.01), _record(a=1.01), _record(a=1.0))
    assert result.equal and not result.wrong


def test_a_missing_tensor_has_an_infinite_error() -> None:
    result = Result()
    compare_errors(result, 0.0, _record(a=1.0), _record(a=1.0, b=1.0), _record(a=1.0, b=1.0))
    assert "b" in result.wrong[0] and result.errors["gradients"][0] == math.inf


def test_what_is_zero_in_exact_arithmetic_is_measured_by_the_largest() -> None:
    exact = {"large": torch.full((4,), 50.0), "zero": torch.zeros(4)}
    errors = errors_of({"large": exact["large"], "zero": torch.full((4,), 1e-3)}, exact)
    assert errors == pytest.approx({"large": 0.0, "zero": 2e-3})


def test_unequal_names_what_differs() -> None:
    want = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    got = {"a": torch.ones(2).bfloat16(), "b": torch.zeros(2), "d": torch.ones(2)}
    text = "\n".join(unequal("buffers", got, want))
    assert "missing c" in text and "added d" in text
    assert "dtypes a torch.bfloat16 for torch.float32" in text and "values of b" in text
    assert unequal("buffers", want, want) == []


def test_the_page_names_failed_cells_and_deepspeeds_column(tmp_path: Path) -> None:
    good, bad = Cell("llama", "bf16", 3, "plain"), Cell("vit", "bf16", 3, "peft")
    results = {
        good: Result({"loss": (1e-5, 1e-5), "gradients": (2e-2, 3e-2), "weights": (1e-2, 1e-2)}, equal=True),
        bad: Result(wrong=["ended with RuntimeError: planned\nand more"]),
    }
    recorded: dict[str, dict[str, Any]] = {
        "llama": {"1": {"gradients": 0.5}, "2": {"error": "planned too"}},
        "vit": {"1": {"error": "planned too"}},
    }
    text = page(results, recorded)
    whole = sum(len(cells_of(family)) for family in FAMILIES)
    assert f"2 of the table's {whole} cells, 1 failed, 0 refused with an error.\n1 cells have" in text
    assert "| llama (R) |  | 2.0e-02 / 3.0e-02 |  |  | 5.0e-01 (not at 2) |" in text
    assert "| vit |  | failed |  |  | doesn't run |" in text
    assert "- `vit-bf16-3-peft`: ended with RuntimeError: planned\n" in text
    assert "- `planned too`: llama (2), vit (1)" in text
