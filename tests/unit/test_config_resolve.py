"""Settling "auto", the batch keys, and what is written down about it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.config import ConfigError, load, resolve

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch(effective):
    config = effective.config
    return (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


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
def test_batch_triangle(given, expected):
    assert batch(resolve(load(given), world_size=4)) == expected


@pytest.mark.parametrize(
    "given", [{}, {GAS: 2}, {TRAIN: 33}, {TRAIN: 2}, {TRAIN: 32, MICRO: 5}, {TRAIN: 32, MICRO: 4, GAS: 3}]
)
def test_batch_mistakes(given):
    with pytest.raises(ConfigError) as caught:
        resolve(load(given), world_size=4)
    message = str(caught.value)
    assert TRAIN in message and MICRO in message
    if TRAIN in given:
        assert str(given[TRAIN]) in message and "world size 4" in message


@given(
    st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sets(st.sampled_from((TRAIN, MICRO, GAS)))
)
def test_any_sufficient_two_give_the_third(micro, gas, world, dropped):
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


def test_sizes_from_hidden_size():
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


def test_optimizer_and_scheduler_auto():
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
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}
    assert config.scheduler.params == {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}
    assert (config.fp16.enabled, config.bf16.enabled, config.gradient_clipping) == (False, False, 1.0)
    assert effective.sources["fp16.enabled"].startswith("auto")
    other = resolve(loaded, world_size=1, default_lr=0.5).config
    assert other.optimizer.params["lr"] == other.scheduler.params["warmup_max_lr"] == 0.5


def test_warmup_max_lr_follows_a_given_lr():
    loaded = load(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        }
    )
    assert resolve(loaded, world_size=1, default_lr=9).config.scheduler.params["warmup_max_lr"] == 0.25


def test_total_num_steps_must_be_given():
    loaded = load(
        {"train_batch_size": 1, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    )
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps.*must be given"):
        resolve(loaded, world_size=1)


def test_every_value_has_a_source_and_digest_is_stable(tmp_path):
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


def test_unchecked_values_keep_their_source():
    loaded = load(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "alpha": 0.9, "foo": "auto"}},
            "amp": {"enabled": False, "nested": {"a": 1}},
        }
    )
    effective = resolve(loaded, world_size=1)
    assert effective.config.optimizer.params == {"alpha": 0.9, "lr": 1e-2}
    assert effective.sources["amp.nested.a"] == "<dict>"
    assert effective.sources["optimizer.params.alpha"] == "<dict>"
    assert effective.sources["optimizer.params.lr"].startswith("auto: torch's default")


def test_wrong_world_size():
    with pytest.raises(ConfigError, match="world_size"):
        resolve(load({"train_batch_size": 1}), world_size=0)
