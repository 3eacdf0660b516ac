"""Test the runtime on a pretended GPU: no race, no memory given back too early, no unlisted wait."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.limits import MATRIX_LIMIT_S
from tests.pretend_gpu.cases import CASES
from tests.pretend_gpu.mutations import MUTATIONS
from tests.pretend_gpu.ranks import Ranks
from tests.selection import sampled_positions
from tests.unit.cuda_ops.test_kernels_shim import built

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "on the device": [n for n, c in CASES.items() if c.world == 1 and (not c.zero or "stepping" in n)],
    "host": [
        n for n, c in CASES.items() if c.world == 1 and c.zero and "disk" not in n and "stepping" not in n
    ],
    "disk": [n for n, c in CASES.items() if c.world == 1 and "disk" in n],
    "2 ranks": [n for n, c in CASES.items() if c.world == 2],
    "4 ranks": [n for n, c in CASES.items() if c.world == 4],
}


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    """Keep a process from which ranks are forked."""
    yield
    if ranks.cache_info().currsize:
        ranks().close()
        ranks.cache_clear()


@functools.cache
def ranks() -> Ranks:
    return Ranks()


def run(*arguments: str, world: int) -> list[dict[str, Any]]:
    """What ranks of `python -m tests.pretend_gpu` have found, case by case, rank by rank."""
    codes, said = ranks().run("tests.pretend_gpu", arguments, world=world, limit_s=MATRIX_LIMIT_S)
    assert codes == [0] * world, said
    return [json.loads(line) for text in said for line in text.splitlines() if line.startswith("{")]


def findings(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return what cases of equal worlds have found, one finding for each rank."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for result in run(*names, world=CASES[names[0]].world):
        found[result["case"]].append(result)
    return found


@functools.cache
def results(group: str) -> dict[str, list[dict[str, Any]]]:
    """Return the findings of a group's cases."""
    return findings(GROUPS[group])


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_every_access_is_ordered_and_every_wait_is_meant(group: str) -> None:
    check(results(group))


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(("on the device", "host", "disk"), id="one rank", marks=pytest.mark.exhaustive),
        pytest.param(("2 ranks",), id="two"),
    ],
)
def test_some_cases_are_in_order(groups: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    """Run a case of each group; other turns have others (see Note [Turns] in tests/selection.py)."""
    turn = pytestconfig.getoption("--turn")
    taken = [sampled_positions(len(GROUPS[group]), 1, turn) for group in groups]
    names = [GROUPS[group][at] for group, kept in zip(groups, taken, strict=True) for at in sorted(kept)]
    check(findings(names))


def check(found_by_case: dict[str, list[dict[str, Any]]]) -> None:
    """Fail where a case has a race, a use after release, or other waits than those listed."""
    wrong = []
    for name, ranks in found_by_case.items():
        case = CASES[name]
        assert len(ranks) == case.world
        for found in ranks:
            waits = {how for how in found.get("waits", ()) if "aside: " not in how}
            if found.get("error") or found["races"] or found["mixes"]:
                wrong.append(found)
            elif waits - case.waits or (case.waits - waits and not case.looks):
                wrong.append({"case": name, "more": waits - case.waits, "less": case.waits - waits})
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["host", "disk"])
def test_where_things_rest_changes_no_loss(group: str) -> None:
    plain = results("on the device")["stage 3 bf16"][0]["losses"]
    accumulated = results("on the device")["stage 3 accumulated"][0]["losses"]
    for name, (found,) in results(group).items():
        if CASES[name].options.keys() == {"bf16"} and not CASES[name].init:
            assert found["losses"] == (accumulated if CASES[name].accumulation > 1 else plain), name


WITH_KERNELS = {
    "stage 1 bf16": {"adam", "prepare", "square_sums", "totals"},
    "stage 3 bf16": {"adam", "prepare", "square_sums", "totals"},
    "stage 1 fp16": {"adam", "prepare", "square_sums", "totals", "update_loss_scale"},
    "stage 2 host": {"square_sums", "totals"},
    "stage 2 host accumulated": {"square_sums", "totals"},
    "stage 3 packed on four": {"adam", "prepare", "square_sums", "totals", "quantize", "dequantize"},
    "stage 3 packed weights on four": {"adam", "prepare", "square_sums", "totals", "quantize", "dequantize"},
    "stage 2 disk": {"square_sums", "totals"},
    "stage 1 narrow": {"narrow_adam", "prepare", "square_sums", "totals"},
    "stage 0 OneBitAdam alone on two": {"compress", "expand", "square_sums", "totals"},
}
"""Case -> which of our kernels it uses; without 16-bit gradients or values the step is torch's own."""


@pytest.mark.exhaustive
@pytest.mark.needs("g++")
def test_our_kernels_are_in_order_and_train_as_their_twins(tmp_path_factory: pytest.TempPathFactory) -> None:
    library = built(tmp_path_factory)
    for world in {CASES[name].world for name in WITH_KERNELS}:
        names = [name for name in WITH_KERNELS if CASES[name].world == world]
        twins = findings(names)
        ours = run("--kernels", str(library), *names, world=world)
        assert len(ours) == world * len(names)
        for number, found in enumerate(ours):
            name, rank = found["case"], number // len(names)
            twin = twins[name][rank]
            assert set(found["kernels"]) == WITH_KERNELS[name], (name, found)
            assert not found["races"] and not found["mixes"], found
            waits = {how for how in found["waits"] if "aside: " not in how}
            assert waits == CASES[name].waits, found["waits"]
            assert found["losses"] == pytest.approx(twin["losses"], rel=1e-3), name


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wait_that_is_left_out_is_missed(name: str) -> None:
    world = CASES[MUTATIONS[name][0]].world
    found = run("--mutations", name, world=world)
    assert any(result["races"] for result in found), found
