"""Test random configs: valid ones load and resolve, anything else raises ConfigError and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zlaunch.runtime.config import Config, ConfigError, load, resolve

Strategy = st.SearchStrategy[Any]
booleans = st.booleans()
counts = st.one_of(st.integers(1, 10**6), st.integers(1, 99).map(float), st.integers(1, 99).map(str))
sizes = st.one_of(st.integers(1, 10**12), st.floats(1, 1e15), st.sampled_from(["5e8", "1e9", "17"]))
rates = st.one_of(st.floats(0, 1), st.sampled_from(["1e-5", 0]))


def auto(values: Strategy) -> Strategy:
    return st.one_of(values, st.just("auto"))


def part(**fields: Strategy) -> Strategy:
    none: dict[str, Strategy] = {}
    return st.fixed_dictionaries(none, optional={key: auto(values) for key, values in fields.items()})


zero = part(
    stage=st.integers(0, 3),
    overlap_comm=st.one_of(booleans, st.none()),
    contiguous_gradients=booleans,
    reduce_scatter=booleans,
    reduce_bucket_size=sizes,
    allgather_bucket_size=sizes,
    sub_group_size=st.one_of(sizes, st.just(0)),
    prefetch_bucket_size=sizes,
    stage3_param_persistence_threshold=sizes,
    max_live_parameters=sizes,
    stage3_max_reuse_distance=sizes,
    ignore_unused_parameters=booleans,
    round_robin_gradients=booleans,
    stage3_gather_16bit_weights_on_model_save=booleans,
    enable_sanity_checks=booleans,
)
adam = part(
    lr=rates, betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2), eps=rates, weight_decay=rates
)
warmup = part(
    warmup_min_lr=rates,
    warmup_max_lr=rates,
    warmup_num_steps=counts,
    warmup_type=st.sampled_from(["log", "linear"]),
)
valid = st.fixed_dictionaries(
    {"train_micro_batch_size_per_gpu": auto(st.integers(1, 100))},
    optional={
        "gradient_accumulation_steps": auto(counts),
        "steps_per_print": st.one_of(counts, st.just(float("inf"))),
        "gradient_clipping": auto(rates),
        "gradient_allreduce_op": st.just("mean"),
        "communication_data_type": st.sampled_from(["fp16", "bfloat16", "float32", None]),
        "wall_clock_breakdown": booleans,
        "zero_optimization": zero,
        "fp16": part(enabled=booleans, loss_scale=rates, hysteresis=counts, auto_cast=booleans),
        "bf16": part(enabled=st.just(False), check_grad_overflow=booleans),
        "optimizer": st.fixed_dictionaries({"type": st.sampled_from(["Adam", "adamw"]), "params": adam}),
        "scheduler": st.fixed_dictionaries({"type": st.just("WarmupLR"), "params": warmup}),
        "tensorboard": part(enabled=booleans, output_path=st.just("out")),
        "checkpoint": part(keep_last=counts, on_signal=booleans),
    },
)
junk = st.recursive(
    st.one_of(
        st.none(),
        booleans,
        st.integers(),
        st.integers(10**300, 10**310),
        st.floats(allow_nan=True, allow_infinity=True),
        st.text(max_size=8),
        st.characters(categories=["Cs"]),
        st.sampled_from(["auto", "", "1e999", "nan", "none"]),
        st.binary(max_size=2),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.integers(), st.none(), st.tuples()), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
keys = sorted(Config.model_fields)
fast = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.rotated
@fast
@given(valid, st.integers(1, 64), st.one_of(st.none(), st.integers(1, 20_000)))
def test_valid_configs_load_and_settle(source: dict[str, Any], world: int, hidden: int | None) -> None:
    before = copy.deepcopy(source)
    effective = resolve(load(source), world_size=world, hidden_size=hidden)
    assert source == before
    config = effective.config
    micro, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert micro is not None and accumulation is not None
    assert config.train_batch_size == micro * accumulation * world
    assert set(effective.sources) == {key for key, _, _ in effective.table()}
    again = resolve(load(json.loads(json.dumps(effective.to_dict()))), world_size=world)
    assert again.digest() == effective.digest()


BREAK: list[tuple[str | None, str, list[Any]]] = [
    ("zero_optimization", "stage", [4, -1, "three", None, True, 1.5]),
    ("zero_optimization", "reduce_bucket_size", [True, -5, "x", [], float("nan")]),
    ("zero_optimization", "overlap_com", [True]),
    ("zero_optimization", "offload_optimizer", [{"device": "nvme"}, {"device": "gpu"}, 3]),
    ("fp16", "enabled", ["yes", 1, None, {}]),
    ("fp16", "loss_scale", [-1, float("inf"), "big"]),
    ("bf16", "enabld", [True]),
    ("tensorboard", "output_path", [1, [], None]),
    (None, "train_micro_batch_size_per_gpu", [0, -1, 1.5, True, []]),
    (None, "gradient_clipping", [-1, "x", None]),
    (None, "gradient_allreduce_op", ["max", 1, None]),
    (None, "optimizer", [{"type": "Nope"}, {}, 1, {"type": "Adam", "params": {"max_grad_norm": 1}}]),
    (None, "scheduler", [{"type": "OneCycle"}, {"type": 3}]),
    (None, "gradient_cliping", [1]),
]


@fast
@given(valid, st.data())
def test_one_mistake_is_found_and_named(source: dict[str, Any], data: st.DataObject) -> None:
    section, key, values = data.draw(st.sampled_from(BREAK))
    source = copy.deepcopy(source)
    target = source if section is None else source.setdefault(section, {})
    target[key] = data.draw(st.sampled_from(values))
    try:
        load(source)
    except ConfigError as error:
        assert all(line.startswith("<dict>: ") for line in str(error).splitlines())
        assert (f"{section}.{key}" if section else key) in str(error)
    else:
        raise AssertionError(f"accepted {key} = {target[key]!r}")


@pytest.mark.rotated
@fast
@given(valid, st.data())
def test_junk_never_raises_anything_else(source: dict[str, Any], data: st.DataObject) -> None:
    source = copy.deepcopy(source)
    for _ in range(data.draw(st.integers(1, 3))):
        target: dict[Any, Any] = source
        inner: list[dict[Any, Any]] = [value for value in source.values() if isinstance(value, dict)]
        if len(inner) > 0 and data.draw(booleans):
            target = data.draw(st.sampled_from(inner))
        names = st.one_of(st.sampled_from([*keys, *map(str, target)]), st.text(max_size=4), st.integers())
        target[data.draw(names)] = data.draw(junk)
    try:
        resolve(load(source), world_size=2).digest()
    except ConfigError as error:
        str(error).encode()


@pytest.mark.rotated
@fast
@given(junk)
def test_junk_as_a_section_or_as_the_source(value: Any) -> None:
    for source in (value, *({key: value} for key in keys[::7])):
        try:
            load(source)
        except ConfigError:
            pass


@fast
@given(st.one_of(st.text(max_size=60), st.text('{}[]",:#/*\\ \n0123eE.+-tfn', max_size=40)))
def test_any_text_as_a_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("fuzz.json", "fuzz.yaml"):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        try:
            load(path)
        except ConfigError:
            pass


@pytest.mark.rotated
@fast
@given(
    st.recursive(
        st.one_of(st.none(), booleans, st.integers(), st.floats(allow_nan=False), st.text()),
        lambda x: st.one_of(st.lists(x), st.dictionaries(st.text(), x)),
        max_leaves=20,
    )
)
def test_reader_agrees_with_json(value: Any) -> None:
    from zlaunch.runtime.config.load import parse

    assert parse(json.dumps(value, indent=1)) == (value, [])
