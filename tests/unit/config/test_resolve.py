"""Test how "auto" and the batch keys are resolved, and what is written down about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.config import ConfigError, Effective, check_batch, load, refuse_open, resolve

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch(effective: Effective) -> tuple[int, int, int]:
    config = effective.config
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    assert train is not None and micro is not None and accumulation is not None
    return train, micro, accumulation


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({TRAIN: 32, MICRO: 4, GAS: 2}, (32, 4, 2)),
        ({TRAIN: 32, MICRO: 4}, (32, 4, 2)),
        ({TRAIN: 32, GAS: 2}, (32, 4, 2)),
        ({MICRO: 4, GAS: 2}, (32, 4, 2)),
        ({TRAIN: 32}, (32, 8, 1)),
        ({MICRO: 4}, (16, 4, 1)),
        ({TRAIN: "auto", MICRO: 4, GAS: "auto"}, (16, 4, 1)),
        ({TRAIN: "auto", MICRO: "auto", GAS: "auto"}, (4, 1, 1)),
        ({MICRO: "auto", GAS: 2}, (8, 1, 2)),
    ],
)
def test_batch_triangle(given: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert batch(resolve(load(given), world_size=4)) == expected


@pytest.mark.parametrize(
    "given", [{}, {GAS: 2}, {TRAIN: 33}, {TRAIN: 2}, {TRAIN: 32, MICRO: 5}, {TRAIN: 32, MICRO: 4, GAS: 3}]
)
def test_batch_mistakes(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load(given), world_size=4)
    message = str(caught.value)
    assert TRAIN in message and MICRO in message
    if TRAIN in given:
        assert str(given[TRAIN]) in message and "world size 4" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {TRAIN: 8, MICRO: 4},
            f"8 is less than {MICRO} 4 * world size 4 = 16 (a step takes at least one micro-batch on every "
            f"rank); set it to 16 or a multiple of it, or change {MICRO} or the number of ranks",
        ),
        (
            {TRAIN: 2},
            "2 is less than world size 4 (a step takes at least one sample on every rank); set it to 4 or a "
            f"multiple of it, or change the number of ranks, or leave it out and give {MICRO}",
        ),
        (
            {TRAIN: 30, MICRO: 4, GAS: "auto"},
            f"30 is not a multiple of {MICRO} 4 * world size 4 = 16 (a step takes at least one micro-batch "
            f"on every rank); set it to 16 or 32, or change {MICRO} or the number of ranks",
        ),
        (
            {TRAIN: 32, MICRO: 4, GAS: 3},
            f"32 is not {MICRO} 4 * {GAS} 3 * world size 4 = 48; set it to 48, or leave out one of the three "
            "keys",
        ),
    ],
)
def test_batch_mistakes_say_what_would_be_right(given: dict[str, Any], expected: str) -> None:
    for check in (lambda: resolve(load(given), world_size=4), lambda: check_batch(load(given), (4,))):
        with pytest.raises(ConfigError) as caught:
            check()
        assert str(caught.value) == f"<dict>: {TRAIN}: {expected}"


def test_only_a_given_batch_size_is_checked_beforehand() -> None:
    for source in ({}, {GAS: 2}, {MICRO: 3}, {TRAIN: "auto", MICRO: 3}, {TRAIN: 12, MICRO: "auto"}):
        check_batch(load(source), (4,))


@pytest.mark.parametrize("path", ["gradient_clipping", "zero_optimization.stage"])
def test_what_only_the_script_knows_may_not_stay_open(path: str) -> None:
    section, _, key = path.rpartition(".")
    given = {section: {key: "auto"}} if section else {key: "auto"}
    with pytest.raises(ConfigError) as caught:
        refuse_open(load(given))
    (line,) = caught.value.problems
    assert line.startswith(f"<dict>: {path}: only the Hugging Face Trainer") and "set" in line
    refuse_open(load({"gradient_clipping": 1.0, "fp16": {"enabled": "auto"}}))


def test_settled_values_are_said_in_one_line() -> None:
    source = {
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "foo": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }
    (line,) = resolve(load(source), world_size=3, hidden_size=8).resolved_auto()
    assert line == (
        '<dict>: "auto" is set to fp16.enabled false, optimizer.params.foo left out, optimizer.params.lr '
        "0.01, train_batch_size 3, zero_optimization.reduce_bucket_size 64"
    )
    assert resolve(load({"train_batch_size": 3}), world_size=3).resolved_auto() == []


def test_a_batch_size_that_nothing_has_given_is_warned_of() -> None:
    (line,) = resolve(load({MICRO: "auto"}), world_size=2).guesses()
    assert line.startswith(f'<dict>: {MICRO}: "auto" became 1') and "set a number" in line
    for source in ({MICRO: 2}, {TRAIN: 4, MICRO: "auto"}, {MICRO: 2, TRAIN: "auto"}):
        assert resolve(load(source), world_size=2).guesses() == []


@given(
    st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sets(st.sampled_from((TRAIN, MICRO, GAS)))
)
def test_any_sufficient_two_give_the_third(micro: int, gas: int, world: int, dropped: set[str]) -> None:
    full = {TRAIN: micro * gas * world, MICRO: micro, GAS: gas}
    kept = {key: value for key, value in full.items() if key not in dropped}
    if len(kept) >= 2:
        assert batch(resolve(load(kept), world_size=world)) == (micro * gas * world, micro, gas)
    elif TRAIN in kept or MICRO in kept:
        train, micro_now, gas_now = batch(resolve(load(kept), world_size=world))
        assert train == micro_now * gas_now * world and gas_now == 1


AUTO_ZERO = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
    },
}


def test_sizes_from_hidden_size() -> None:
    loaded = load(AUTO_ZERO)
    effective = resolve(loaded, world_size=1, hidden_size=65, hidden_size_from="model.config.hidden_size")
    zero = effective.config.zero_optimization
    assert zero.reduce_bucket_size == 65 * 65
    assert zero.stage3_prefetch_bucket_size == int(0.9 * 65 * 65)
    assert zero.stage3_param_persistence_threshold == 650
    sources = effective.sources
    assert (
        sources["zero_optimization.stage3_param_persistence_threshold"]
        == "auto: 10 * hidden_size 65 from model.config.hidden_size"
    )
    assert sources["zero_optimization.stage3_max_live_parameters"] == "auto: default"
    assert sources["zero_optimization.stage"] == "<dict>"
    assert sources["gradient_clipping"].startswith("default since DeepSpeed 0.19.3")
    plain = resolve(loaded, world_size=1)
    assert plain.config.zero_optimization.reduce_bucket_size == 500_000_000
    assert plain.sources["zero_optimization.reduce_bucket_size"].startswith("auto: default")


def test_optimizer_and_scheduler_auto() -> None:
    loaded = load(
        {
            "train_batch_size": 1,
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
        }
    )
    effective = resolve(loaded, world_size=1)
    config = effective.config
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}
    assert config.scheduler.params == {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}
    assert (config.fp16.enabled, config.bf16.enabled, config.gradient_clipping) == (False, False, 1.0)
    assert effective.sources["fp16.enabled"].startswith("auto")
    other = resolve(loaded, world_size=1, default_lr=0.5).config
    assert other.optimizer is not None and other.scheduler is not None
    assert other.optimizer.params["lr"] == other.scheduler.params["warmup_max_lr"] == 0.5


def test_warmup_max_lr_follows_a_given_lr() -> None:
    loaded = load(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        }
    )
    scheduler = resolve(loaded, world_size=1, default_lr=9).config.scheduler
    assert scheduler is not None and scheduler.params["warmup_max_lr"] == 0.25


def test_total_num_steps_must_be_given() -> None:
    loaded = load(
        {"train_batch_size": 1, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    )
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps.*set a value"):
        resolve(loaded, world_size=1)


def test_every_value_has_a_source_and_digest_is_stable(tmp_path: Path) -> None:
    loaded = load(AUTO_ZERO)
    effective = resolve(loaded, world_size=2, hidden_size=8)
    rows = effective.table()
    assert [row[0] for row in rows] == list(effective.sources)
    assert all(source for _, _, source in rows)
    again = resolve(load(effective.to_dict()), world_size=2)
    assert again.config == effective.config and again.digest() == effective.digest()
    assert resolve(loaded, world_size=4, hidden_size=8).digest() != effective.digest()
    path = tmp_path / "effective.json"
    effective.write(path)
    effective.write(path)
    written = json.loads(path.read_text())
    assert written == {"config": effective.to_dict(), "sources": effective.sources}
    assert [item.name for item in tmp_path.iterdir()] == ["effective.json"]


def test_unchecked_values_keep_their_source() -> None:
    loaded = load(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "alpha": 0.9, "foo": "auto"}},
            "curriculum_learning": {"enabled": False, "nested": {"a": 1}},
        }
    )
    effective = resolve(loaded, world_size=1)
    assert effective.config.optimizer is not None
    assert effective.config.optimizer.params == {"alpha": 0.9, "lr": 1e-2}
    assert effective.sources["curriculum_learning.nested.a"] == "<dict>"
    assert effective.sources["optimizer.params.alpha"] == "<dict>"
    assert effective.sources["optimizer.params.lr"].startswith("auto: torch's default")


def test_wrong_world_size() -> None:
    with pytest.raises(ConfigError, match="world_size"):
        resolve(load({"train_batch_size": 1}), world_size=0)


def test_secrets_are_not_written(tmp_path: Path) -> None:
    loaded = load({"train_batch_size": 2, "comet": {"enabled": True, "api_key": "secret-key"}})
    effective = resolve(loaded, world_size=1)
    effective.write(tmp_path / "config.json")
    assert "secret-key" not in (tmp_path / "config.json").read_text() + str(effective.table())
    assert effective.config.comet.api_key == "secret-key"
