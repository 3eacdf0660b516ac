"""Test that keys of other tools which ask for something are errors that say how to ask for it here."""

from __future__ import annotations

from typing import Any

import pytest

from zlaunch.runtime.config import ConfigError, load
from zlaunch.runtime.config.foreign_keys import FOREIGN
from zlaunch.runtime.config.known_keys import homes


def problems(source: dict[str, Any]) -> list[str]:
    try:
        load(source)
    except ConfigError as error:
        return [line.removeprefix("<dict>: ") for line in error.problems]
    return []


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"zero_stage": 3}, "zero_stage", "this is zero_optimization.stage here"),
        ({"mixed_precision": "bf16"}, "mixed_precision", "this is bf16.enabled or fp16.enabled here"),
        ({"max_grad_norm": 1.0}, "max_grad_norm", "this is gradient_clipping here"),
        ({"max_grad_norm": 0}, "max_grad_norm", "this is gradient_clipping here"),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val", "this is gradient_clipping here"),
        ({"learning_rate": 1e-4}, "learning_rate", "this is optimizer.params.lr here"),
        (
            {"per_device_train_batch_size": 4},
            "per_device_train_batch_size",
            "this is train_micro_batch_size_per_gpu here",
        ),
        ({"gradient_checkpointing": True}, "gradient_checkpointing", "activation_checkpointing.enabled here"),
        ({"precision": "16-mixed"}, "precision", "this is bf16.enabled or fp16.enabled here"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "this is parallel.pipeline here"),
        ({"fp8": True}, "fp8", "zlaunch trains in fp32, bf16 and fp16"),
        ({"fp8": {"enabled": True}}, "fp8", "zlaunch trains in fp32, bf16 and fp16"),
        ({"transformer_engine": {"enabled": True}}, "transformer_engine", "enabled: true asks for"),
        ({"tricks": {"inner": {"enabled": "true", "x": 1}}}, "tricks", "inner.enabled: true asks for"),
        ({"tricks": [{"enabled": 1}]}, "tricks", "0.enabled: true asks for"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "belongs in zero_optimization"),
        ({"lr": 0.1}, "lr", "belongs in optimizer.params"),
    ],
)
def test_a_wish_of_another_tool_is_an_error(source: dict[str, Any], key: str, words: str) -> None:
    (line,) = problems(source)
    assert line.startswith(f"{key}: ") and words in line, line
    warnings = load({**source, "strict": False}).warnings
    assert [warning.split(": ")[1] for warning in warnings] == [key]


@pytest.mark.parametrize(
    "source",
    [
        {"mixed_precision": "no"},
        {"mixed_precision": None},
        {"precision": "32-true"},
        {"gradient_checkpointing": False},
        {"fp8": {"enabled": False}},
        {"tricks": {"enabled": "auto"}},
        {"tricks": {"enabled": False, "inner": {"value": 1}}},
        {"_fp16": {"enabled": True}},
        {"comment": {"enabled": True}},
        {"seed": 1, "num_train_epochs": 3, "output_dir": "out", "model": {"layers": 12}},
    ],
)
def test_what_asks_for_nothing_is_a_warning(source: dict[str, Any]) -> None:
    """Sections that somebody has put aside by an underscore, too."""
    assert problems(source) == []
    assert len(load(source).warnings) == len(source)


def test_the_table_names_keys_that_exist_here() -> None:
    known = homes()
    for key, here in FOREIGN.items():
        assert key not in known, key
        for place in here.split(" or ") if here and " " not in here.replace(" or ", "") else ():
            section, _, name = place.rpartition(".")
            assert section in known[name], (key, place)
