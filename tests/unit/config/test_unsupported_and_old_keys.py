"""Test what a config may ask for: old spellings, switched-off features, keys in the wrong place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zlaunch.runtime.config import ConfigError, json_schema, load, resolve


def problems(source: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(source)
    return [line.removeprefix("<dict>: ") for line in caught.value.problems]


def warnings(source: dict[str, Any]) -> list[str]:
    return [line.removeprefix("<dict>: ") for line in load(source).warnings]


@pytest.mark.parametrize(
    "source",
    [
        {"tensor_parallel": {"autotp_size": 0}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
        {"sequence_parallel_size": 1, "data_parallel_size": 1},
        {"zero_optimization": {"mics_shard_size": -1}},
        {"zero_optimization": {"mics_shard_size": 0, "zero_hpz_partition_size": 1}},
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}},
        {"zero_optimization": {"cpu_offload": False, "cpu_offload_param": None}},
    ],
)
def test_features_of_size_one_are_off(source: dict[str, Any]) -> None:
    assert warnings(source) == []


@pytest.mark.parametrize(
    ("source", "path", "feature"),
    [
        (
            {"zero_optimization": {"mics_hierarchical_params_gather": True}},
            "zero_optimization.mics_hierarchical_params_gather",
            "MiCS",
        ),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled", "hybrid engine"),
    ],
)
def test_more_than_one_names_the_feature(source: dict[str, Any], path: str, feature: str) -> None:
    (line,) = problems(source)
    assert line.startswith(path) and feature.lower() in line.lower() and "is not supported yet" in line


@pytest.mark.parametrize("zero", [0, 0.0, "0"])
def test_sub_group_size_zero_is_the_default(zero: float | str) -> None:
    config = load({"zero_optimization": {"stage": 3, "sub_group_size": zero}}).config
    assert config.zero_optimization.sub_group_size == 1_000_000_000
    with pytest.raises(ConfigError, match="sub_group_size"):
        load({"zero_optimization": {"sub_group_size": -1}})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offload_param_below_stage_3_is_ignored(stage: int) -> None:
    part = {"device": "nvme", "pin_memory": False}  # no nvme_path: nobody needs it
    loaded = load(
        {"train_batch_size": 1, "zero_optimization": {"stage": stage, "offload_param": part}},
    )
    (line,) = loaded.warnings
    assert "zero_optimization.offload_param: ignored: only stage 3 shards parameters" in line
    effective = resolve(loaded, world_size=1)
    assert effective.config.zero_optimization.offload_param is None
    assert effective.sources["zero_optimization.offload_param"].startswith("ignored")
    assert warnings({"zero_optimization": {"stage": stage, "offload_param": {"device": "none"}}}) == []


def test_a_section_that_is_off_decides_nothing() -> None:
    from zlaunch.runtime.offload.manager import offload_options

    source: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none", "pin_memory": False},
    }
    assert offload_options(load({"zero_optimization": source}).config, 2).pin
    source["offload_param"]["device"] = "cpu"
    assert not offload_options(load({"zero_optimization": source}).config, 2).pin


def test_offload_param_at_stage_3_is_checked_as_before() -> None:
    (line,) = problems({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    assert line.startswith("zero_optimization.offload_param.nvme_path: is required")
    (line,) = problems({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert line.startswith("zero_optimization.offload_optimizer.device:") and "needs stage 1, 2 or 3" in line


def test_a_stage_that_is_still_open_is_not_judged() -> None:
    source: dict[str, Any] = {
        "zero_optimization": {
            "stage": "auto",
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    }
    loaded = load(source)
    offload = loaded.config.zero_optimization.offload_param
    assert loaded.warnings == () and offload is not None and offload.device == "cpu"
    source["zero_optimization"]["offload_param"]["device"] = "nvme"
    assert load(source).warnings == ()
    source["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    (line,) = problems(source)
    assert line.startswith("zero_optimization.offload_optimizer.nvme_path: is required")


def test_a_schema_for_the_editor_is_no_setting() -> None:
    assert warnings({"$schema": "ds.schema.json", "strict": True}) == []


@pytest.mark.parametrize("key", ["_comment", "//", "comment", "comments", "model_name", "num_epochs", "data"])
def test_a_foreign_top_level_key_is_a_warning(key: str) -> None:
    assert warnings({key: 1}) == [f"{key}: unknown key, ignored"]
    assert problems({key: 1, "strict": True}) == [f"{key}: unknown key"]
    assert warnings({key: 1, "strict": False}) == [f"{key}: unknown key, ignored"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [("fp17", "fp16"), ("gradient_cliping", "gradient_clipping"), ("train_batchsize", "train_batch_size")],
)
def test_a_top_level_key_close_to_a_known_one_is_an_error(key: str, meant: str) -> None:
    assert problems({key: 1}) == [f"{key}: unknown key, did you mean {meant}?"]
    assert warnings({key: 1, "strict": False}) == [f"{key}: unknown key, did you mean {meant}?, ignored"]


def test_a_key_does_not_belong_where_it_is() -> None:
    (said,) = problems({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "maximize": True}}})
    assert said.startswith("optimizer.params.maximize: unknown key") and "belongs" not in said


def test_unknown_keys_in_sections_are_errors() -> None:
    assert problems({"zero_optimization": {"_comment": 1}}) == ["zero_optimization._comment: unknown key"]
    assert problems({"data_types": {"xyz": 1}}) == [
        "data_types.xyz: unknown key, expected one of grad_accum_dtype, param_dtype, buffer_dtype, "
        "keep_in_fp32_modules"
    ]


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_zero_optimization_as_a_switch(value: bool, stage: int) -> None:
    source = {"zero_optimization": value}
    loaded = load(source)
    assert loaded.config.zero_optimization.stage == stage and source == {"zero_optimization": value}
    assert loaded.raw == source and loaded.warnings == ()


def test_old_spellings_of_offload() -> None:
    zero = load(
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    ).config.zero_optimization
    assert zero.offload_optimizer is not None and zero.offload_param is not None
    assert zero.offload_optimizer.device == zero.offload_param.device == "cpu"
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert problems({"zero_optimization": both}) == [
        "zero_optimization.cpu_offload: is the old spelling of offload_optimizer, give only that"
    ]
    assert "expected true" in problems({"zero_optimization": {"cpu_offload": "yes"}})[0]


def _in_bf16(**more: Any) -> dict[str, Any]:
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": {**keys, **more}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_deepspeeds_switches_for_a_step_in_bf16() -> None:
    source = _in_bf16()
    loaded = load(source)
    assert loaded.config.bf16.master_weights == "stochastic" and source == _in_bf16()
    assert loaded.config.optimizer is not None
    assert loaded.config.optimizer.params == {"state_dtype": "bf16", "lr": 1e-3}
    assert len(loaded.warnings) == 2 and all("rounds to the nearest" in line for line in loaded.warnings)

    off = load(_in_bf16(enabled=False)).config  # as in DeepSpeed, without effect
    assert off.bf16.master_weights == "fp32"
    assert problems(_in_bf16(master_weights="fp32")) == [
        "bf16.bf16_master_weights_and_grads: true contradicts master_weights: remove one of them"
    ]
    source["optimizer"]["params"]["state_dtype"] = "int8"
    assert problems(source) == [
        "bf16.bf16_optimizer_states: true contradicts optimizer.params.state_dtype: remove one of them"
    ]
    assert problems({"bf16": _in_bf16()["bf16"]}) == [
        "bf16.bf16_optimizer_states: true needs the optimizer in the config: a script's own chooses the type "
        "of its state"
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"zero_optimization": {"aio": {}}}, "zero_optimization.aio: {}, it belongs to the top level: "
         '"aio": {{}}'),
        ({"stage": 2}, 'stage: {}, it belongs in zero_optimization: "zero_optimization": {{"stage": 2}}'),
        ({"lr": 1e-3}, 'lr: {}, it belongs in optimizer.params: "optimizer": {{"params": {{"lr": 0.001}}}}'),
        ({"total_num_steps": 9}, 'total_num_steps: {}, it belongs in scheduler.params: '
         '"scheduler": {{"params": {{"total_num_steps": 9}}}}'),
        ({"optimizer": {"type": "Adam", "lr": 1}}, 'optimizer.lr: {}, it belongs in optimizer.params: '
         '"optimizer": {{"params": {{"lr": 1}}}}'),
        ({"nvme_path": "x"}, "nvme_path: {}, it belongs in zero_optimization.offload_param or "
         "zero_optimization.offload_optimizer"),
        ({"fp16": {"gradient_clipping": 1}}, 'fp16.gradient_clipping: {}, it belongs to the top level: '
         '"gradient_clipping": 1'),
        ({"fp16": {"max_train_batch_size": 1}}, "fp16.max_train_batch_size: {}, it belongs in elasticity or "
         "autotuning"),
        ({"enabled": True}, "enabled: {}, it belongs in a section, such as fp16, bf16, "
         "torch_autocast"),
        ({"zero_optimization": {"offload_optimizer": {"buffer_size": 1}}}, "zero_optimization."
         "offload_optimizer.buffer_size: {}, it belongs in zero_optimization.offload_param: "
         '"zero_optimization": {{"offload_param": {{"buffer_size": 1}}}}'),
    ],
)  # fmt: skip
def test_known_keys_in_the_wrong_place(source: dict[str, Any], line: str) -> None:
    assert problems(source) == [line.format("unknown key here")]


def test_a_key_that_only_another_precision_has() -> None:
    assert problems({"bf16": {"hysteresis": 2}}) == ["bf16.hysteresis: unknown key, only fp16 has it"]


def test_every_known_key_is_known_everywhere() -> None:
    """In a section that does not have it, each key is told where it belongs."""
    from zlaunch.runtime.config.check import homes

    elsewhere = {key: places for key, places in homes().items() if "data_types" not in places}
    assert len(elsewhere) > 200
    for key, places in elsewhere.items():
        (line,) = problems({"data_types": {key: None}})
        assert line.startswith(f"data_types.{key}: unknown key here, it belongs ")
        named = line.rpartition("belongs ")[2]
        assert ("the top level" in named) == ("" in places)
        assert "" in places or any(place in named for place in places)
        assert named.count(",") + named.count(" or ") <= 3


def test_schema_has_only_what_a_schema_has() -> None:
    for part in (json_schema(), *json_schema()["$defs"].values()):
        for prop in part["properties"].values():
            assert not prop.keys() & {"aliases", "feature", "off", "why", "holds"}, json.dumps(prop)


def test_a_path_on_the_nodes_own_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's scratch folder has its own name on each node and in each job."""
    from zlaunch.runtime.offload.manager import offload_options

    monkeypatch.setenv("TMPDIR", "/scratch/7")
    monkeypatch.delenv("SCRATCH_OF_MINE", raising=False)

    def options(path: str) -> Any:
        section = {"device": "nvme", "nvme_path": path}
        zero = {"stage": 3, "offload_optimizer": section, "offload_param": section}
        return offload_options(load({"zero_optimization": zero}).config, 2)

    found = options("$TMPDIR/nvme")
    assert found.optimizer_path == found.parameters_path == "/scratch/7/nvme"
    assert options("/local").optimizer_path == "/local"
    with pytest.raises(
        ConfigError, match=r"offload_optimizer.nvme_path: \$SCRATCH_OF_MINE/x: the .* no variable SCRATCH"
    ):
        options("$SCRATCH_OF_MINE/x")
    monkeypatch.setenv("SCRATCH_OF_MINE", "")
    with pytest.raises(ConfigError, match="the worker's environment has an empty SCRATCH_OF_MINE"):
        options("${SCRATCH_OF_MINE}/x")  # it would be a folder of the root
    (tmp_path / "$SCRATCH_OF_MINE").mkdir()
    assert options(f"{tmp_path}/$SCRATCH_OF_MINE").optimizer_path == f"{tmp_path}/$SCRATCH_OF_MINE"
    unused = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "$SCRATCH_OF_MINE"}}
    assert offload_options(load({"zero_optimization": unused}).config, 2).parameters_path is not None
