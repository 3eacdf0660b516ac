"""Test that what is estimated for a model is what a rank takes at most in a step, by torch's own records, and
that the choice which follows is the right one.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.memory.measured import ENV, HALF, SETTINGS, WORLD, Setting, peaks
from tests.runtime.memory.models import HERE, KINDS, TOKENS, builder
from tests.runtime.workers import run_workers
from zlaunch.runtime.errors import MemoryPlanError
from zlaunch.runtime.memory.choices import Estimated, Machines, compare, fastest_that_fits
from zlaunch.runtime.memory.fake_step import computing_in, of_module
from zlaunch.runtime.memory.model import ModelSizes, from_function, from_hugging_face
from zlaunch.runtime.offload.manager import Tier

QUICK = [("mlp", False), ("llama", True)]
IN_BF16 = ("mixtral", "gpt2")  # slow on most CPUs, and llama is among the quick ones
HALVES = [*((name, True) for name in IN_BF16), ("llama", "autocast")]
EVERY = [*((name, False) for name in KINDS if name not in (*IN_BF16, "lstm")), *HALVES]
CAPS, FITTING = 200, ("llama", "bert", "mlp", "t5")
MORE = [*((name, False) for name in FITTING if name != "mlp"), ("mixtral", True), ("llama", "autocast")]


def sizes(name: str, folder: Path) -> ModelSizes:
    kind = KINDS[name]
    if kind.build:
        return from_function(f"{HERE}:{kind.build}")
    builder(kind, save=folder)
    return from_hugging_face(str(folder))


def estimates(name: str, half: bool | str, folder: Path) -> list[Estimated]:
    """Return what is estimated without offload, the fastest first."""
    words = {True: "bf16", False: "fp32", "autocast": "bf16_autocast"}
    (dtype, around), kind = computing_in(words[half]), KINDS[name]
    model = sizes(name, folder)
    activations = of_module(model, TOKENS, kind.samples, dtype, kind.shape or None, around)
    assert activations is not None
    machines = Machines(nodes=1, gpus=WORLD, gpu_bytes=None, host_bytes=None)
    found = compare(model, machines, activations, dtype_bytes=dtype.itemsize)
    return [each for each in found if each.choice.optimizer is Tier.DEVICE]


@cache
def measured(name: str, half: bool | str, settings: tuple[Setting, ...] = ()) -> dict[Setting, int]:
    """Return what the rank that takes most takes, in some settings or all."""
    every = name in FITTING or (name, half) in QUICK
    ranks = run_workers(peaks, WORLD, name, half, settings or (SETTINGS if every else HALF), env=ENV)
    return {each: max(rank[each] for rank in ranks) for each in ranks[0]}


def key(each: Estimated) -> Setting:
    return each.choice.stage, each.choice.checkpointed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take more models where all tests are run, and every one with `--every-case`."""
    if "half" in metafunc.fixturenames:
        more = EVERY if metafunc.config.getoption("--every-case") else MORE
        marked = [
            pytest.param(*each, (), marks=pytest.mark.exhaustive, id=f"{each[0]}-{each[1]}")
            for each in more
            if each not in QUICK
        ]
        # bf16 takes ten times as long on a CPU without such units: each half of the settings by itself
        rest = tuple(each for each in SETTINGS if each not in HALF)
        halves = [
            pytest.param("llama", True, HALF, marks=pytest.mark.exhaustive, id="llama-True"),
            pytest.param("llama", True, rest, marks=pytest.mark.exhaustive, id="llama-True-rest"),
        ]
        quick = [pytest.param("mlp", False, (), id="mlp-False"), *halves]
        metafunc.parametrize(("name", "half", "settings"), [*quick, *marked])


@pytest.mark.exhaustive
def test_the_estimate_is_what_a_step_takes(
    name: str, half: bool | str, settings: tuple[Setting, ...], tmp_path: Path
) -> None:
    found = {key(each): each.device for each in estimates(name, half, tmp_path)}
    assert set(found) == set(SETTINGS) and len(measured(name, half, settings)) >= len(HALF)
    real = measured(name, half, settings)
    ratios = {each: found[each] / real[each] for each in real}
    print(name, half, {each: round(ratio, 3) for each, ratio in ratios.items()})
    # under autocast more is freed with a block's activations than is assumed: copies of its weights
    most = 1.15 if half == "autocast" else 1.1
    assert not {each: ratio for each, ratio in ratios.items() if not 0.9 <= ratio <= most}


@pytest.mark.exhaustive
def test_the_choice_for_a_size_of_gpu_is_the_right_one(tmp_path: Path) -> None:
    """It is wrong if it does not fit by what was measured, or if a faster one does."""
    draw, right = random.Random(0), 0
    for name in FITTING:
        folder = tmp_path / name
        found, real = estimates(name, False, folder), measured(name, False)
        least, most = min(real.values()), max(real.values())
        for _ in range(CAPS // len(FITTING)):
            machines = Machines(nodes=1, gpus=WORLD, gpu_bytes=None, host_bytes=None)
            for_model = draw.randint(int(0.95 * least), int(1.05 * most))
            machines = replace(machines, gpu_bytes=machines.reserved_bytes + for_model)
            best = fastest_that_fits(found, machines)
            fitting = [key(each) for each in found if real[key(each)] <= for_model]
            good = (key(best) if best else None) == (fitting[0] if fitting else None)
            right += good
            if not good:
                print(name, for_model, best and key(best), fitting[:1])
    print(f"{right} of {CAPS}")
    assert right >= 0.95 * CAPS


@pytest.mark.rotated
def test_what_cannot_be_estimated_is_refused(tmp_path: Path) -> None:
    """The experts of Mixtral are computed in bf16 alone on fake tensors; an LSTM keeps what nobody sees."""
    with pytest.raises(MemoryPlanError, match="lstm: zlaunch cannot estimate the activations"):
        estimates("lstm", False, tmp_path)
    with pytest.raises(MemoryPlanError, match=r"cannot be run on fake tensors: .* BF16"):
        estimates("mixtral", False, tmp_path)
