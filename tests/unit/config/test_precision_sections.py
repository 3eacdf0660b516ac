"""Test the sections that say how a model computes: fp16, bf16, torch_autocast and amp."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from zlaunch.runtime.config import ConfigError, load
from zlaunch.runtime.errors import LossScaleFloorError
from zlaunch.runtime.precision import Precision, choose_precision

ON = {"enabled": True}


def chosen(**sections: Any) -> Precision:
    return choose_precision(load(sections).config)


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(sections)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_autocast_to_bf16_scales_nothing(name: str) -> None:
    for section in (ON, {**ON, "dtype": name}):
        found = chosen(torch_autocast=section)
        assert (found.dtype, found.autocast) == (None, torch.bfloat16)
        assert not found.scaler.used and not found.check_finite and not found.cast_inputs


@pytest.mark.parametrize("name", ["fp16", "float16", "half"])
def test_autocast_to_fp16_scales_as_grad_scaler_does(name: str) -> None:
    found = chosen(torch_autocast={**ON, "dtype": name}, fp16={"initial_scale_power": 3, "hysteresis": 5})
    assert (found.dtype, found.autocast, found.check_finite) == (None, torch.float16, True)
    theirs = torch.amp.GradScaler("cpu")
    scaler = found.scaler
    assert (scaler.dynamic, scaler.scale, scaler.window) == (
        True,
        theirs._init_scale,
        theirs.get_growth_interval(),
    )
    scaler.note(True)
    assert scaler.scale == theirs._init_scale * theirs.get_backoff_factor()


@pytest.mark.parametrize(
    ("section", "autocast", "scale", "dynamic", "checks"),
    [
        ({}, torch.float16, 65536.0, True, True),
        ({"opt_level": "O1", "loss_scale": "dynamic"}, torch.float16, 65536.0, True, True),
        ({"loss_scale": 128.0}, torch.float16, 128.0, False, True),
        ({"loss_scale": "128.0"}, torch.float16, 128.0, False, True),
        ({"loss_scale": 1}, torch.float16, 1.0, False, True),
        ({"opt_level": "O0"}, None, 1.0, False, False),
        ({"opt_level": "O0", "loss_scale": 8}, None, 8.0, False, True),
        ({"opt_level": "O0", "loss_scale": "dynamic"}, None, 65536.0, True, True),
        ({"min_loss_scale": 4.0}, torch.float16, 65536.0, True, True),
        ({"opt_level": "auto", "loss_scale": "auto"}, torch.float16, 65536.0, True, True),
    ],
)
def test_amp(
    section: dict[str, Any], autocast: torch.dtype | None, scale: float, dynamic: bool, checks: bool
) -> None:
    found = chosen(amp={**ON, **section})
    assert (found.dtype, found.autocast, found.check_finite) == (None, autocast, checks)
    assert (found.scaler.scale, found.scaler.dynamic) == (scale, dynamic)
    assert found.scaler.min_scale == section.get("min_loss_scale", 1.0)


def test_a_minimum_of_0_is_one_that_can_be_divided_by() -> None:
    scaler = chosen(fp16={**ON, "min_loss_scale": 0, "hysteresis": 1}).scaler
    with pytest.raises(LossScaleFloorError):
        for _ in range(1000):
            scaler.note(overflow=True)
    assert scaler.scale == torch.finfo(torch.float32).tiny


def test_sections_that_are_off_choose_nothing() -> None:
    off = {"enabled": False}
    assert chosen(torch_autocast={**off, "dtype": "fp16"}, amp={**off, "loss_scale": 8}) == chosen()
    left_open = {"enabled": "auto"}
    assert chosen(torch_autocast=left_open, amp={**left_open, "opt_level": "auto"}) == chosen()


@pytest.mark.parametrize("pair", [*itertools.combinations(("fp16", "bf16", "torch_autocast", "amp"), 2)])
def test_two_at_once_are_refused(pair: tuple[str, str]) -> None:
    first, second = pair
    if pair == ("bf16", "torch_autocast"):
        line = problem(bf16=ON, torch_autocast={**ON, "dtype": "float16"})
        assert line.startswith("<dict>: torch_autocast.dtype: parameters are bf16 and operations float16")
        assert chosen(bf16=ON, torch_autocast=ON) == replace(chosen(bf16=ON), autocast=torch.bfloat16)
        return
    line = problem(**{first: ON, second: ON})
    assert line == f"<dict>: {second}.enabled: {first} and {second} are both enabled, enable only one"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"opt_level": "O2"}, 'amp.opt_level: "O2" is apex\'s training with fp16 parameters'),
        ({"opt_level": "O3"}, '"fp16": {"enabled": true} instead of amp'),
        ({"opt_level": "O4"}, "amp.opt_level: "),
        ({"max_loss_scale": 1024}, "amp.max_loss_scale: 1024.0 asks for a maximum loss scale"),
        ({"num_losses": 2}, "amp.num_losses: 2 asks for separate loss scales"),
        ({"keep_batchnorm_fp32": True}, "amp.keep_batchnorm_fp32: true asks for a setting of O2"),
        ({"keep_batchnorm_fp32": "False"}, "amp.keep_batchnorm_fp32: "),
        ({"master_weights": True}, "amp.master_weights: "),
        ({"cast_model_type": "fp16"}, "amp.cast_model_type: "),
        ({"cast_model_outputs": "fp32"}, "amp.cast_model_outputs: "),
        ({"patch_torch_functions": False}, "amp.patch_torch_functions: false asks for O1 without casts"),
        ({"loss_scale": 0}, 'amp.loss_scale: 0 is not allowed, expected "dynamic" or a number above 0'),
        ({"loss_scale": "static"}, "amp.loss_scale: "),
        ({"min_loss_scale": 0}, "amp.min_loss_scale: "),
        ({"opt_leve": "O1"}, "amp.opt_leve: unknown key, did you mean opt_level?"),
    ],
)
def test_arguments_of_apex_that_are_refused(section: dict[str, Any], words: str) -> None:
    assert words in problem(amp={**ON, **section})


def test_what_autocast_does_not_take() -> None:
    text = "torch_autocast.dtype: {} is not allowed, expected one of bfloat16, float16 (or bf16, fp16)"
    assert text.format('"fp32"') in problem(torch_autocast={**ON, "dtype": "fp32"})
    assert text.format("null") in problem(torch_autocast={**ON, "dtype": None})
    assert "did you mean dtype?" in problem(torch_autocast={**ON, "dtyp": "bf16"})
    assert "is not allowed" in problem(torch_autocast={**ON, "lower_precision_safe_modules": [1]})
    assert "param_dtype" in problem(torch_autocast=ON, data_types={"param_dtype": "bf16"})
    assert "tf32: 1 is not allowed" in problem(tf32=1)


def test_the_list_of_safe_modules_is_said_to_do_nothing() -> None:
    section: dict[str, Any] = {**ON, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    (line,) = load({"torch_autocast": section}).warnings
    assert line.startswith("<dict>: torch_autocast.lower_precision_safe_modules: no effect: ")
    assert not load({"torch_autocast": {**ON, "lower_precision_safe_modules": []}}).warnings
    assert not load({"torch_autocast": ON}).warnings
    (line,) = load({"amp": {**ON, "verbosity": 0}}).warnings
    assert line.startswith("<dict>: amp.verbosity: ")
