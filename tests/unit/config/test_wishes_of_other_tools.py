"""Test that keys of other tools which ask for something are errors that say how to ask for it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zlaunch.runtime.config import Config, ConfigError, load
from zlaunch.runtime.config.check import homes, names, unknown
from zlaunch.runtime.config.foreign_keys import FOREIGN
from zlaunch.runtime.config.forms import forms, read_stage
from zlaunch.runtime.config.other_names import read_optimizer, read_scheduler

DATA = Path(__file__).parents[2] / "data"


def problems(source: dict[str, Any]) -> list[str]:
    try:
        load(source)
    except ConfigError as error:
        return [line.removeprefix("<dict>: ") for line in error.problems]
    return []


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"zero_stage": 3}, "zero_stage", 'use zero_optimization.stage: "zero_optimization": {"stage": 3}'),
        ({"mixed_precision": "bf16"}, "mixed_precision", 'use bf16.enabled: "bf16": {"enabled": true}'),
        ({"mixed_precision": "fancy"}, "mixed_precision", "use bf16.enabled or fp16.enabled"),
        ({"max_grad_norm": 1.0}, "max_grad_norm", 'write "gradient_clipping": 1.0'),
        ({"max_grad_norm": 0}, "max_grad_norm", 'write "gradient_clipping": 0'),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val", 'write "gradient_clipping": 0.5'),
        ({"learning_rate": 1e-4}, "learning_rate", 'use optimizer.params.lr: "optimizer": {"params": {"lr"'),
        (
            {"per_device_train_batch_size": 4},
            "per_device_train_batch_size",
            'write "train_micro_batch_size_per_gpu": 4',
        ),
        (
            {"gradient_checkpointing": True},
            "gradient_checkpointing",
            "use activation_checkpointing.enabled: ",
        ),
        ({"precision": "16-mixed"}, "precision", 'use fp16.enabled: "fp16": {"enabled": true}'),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size",
            'use parallel.pipeline: "parallel": {"pipeline": 2}',
        ),
        ({"fp8": True}, "fp8", "zlaunch trains in fp32, bf16 and fp16"),
        ({"fp8": {"enabled": True}}, "fp8", "zlaunch trains in fp32, bf16 and fp16"),
        ({"transformer_engine": {"enabled": True}}, "transformer_engine", "not in fp8"),
        ({"new_tricks": {"enabled": True}}, "new_tricks", "enabled: true enables"),
        ({"tricks": {"inner": {"enabled": "true", "x": 1}}}, "tricks", "inner.enabled: true enables"),
        ({"tricks": [{"enabled": 1}]}, "tricks", "0.enabled: true enables"),
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


@pytest.mark.parametrize("key", FOREIGN)
def test_the_table_names_keys_that_exist_here(key: str) -> None:
    assert key not in names(Config)
    written = {path for value in SAMPLES for path in FOREIGN[key].convert(value)}
    for place in (*FOREIGN[key].keys, *written):
        section, _, name = place.rpartition(".")
        assert section in homes()[name], (key, place)
    assert FOREIGN[key].keys or FOREIGN[key].note


SAMPLES = (1, "bf16", "16-mixed", "adamw_torch", "cosine", "full_shard", "cpu", True)


@pytest.mark.parametrize("key", FOREIGN)
def test_what_the_table_writes_is_a_good_config(key: str) -> None:
    """But for what else it needs, such as the stage beside offload."""
    for value in SAMPLES:
        for line in problems(json.loads(f"{{{forms(FOREIGN[key].convert(value))}}}".replace("STEPS", "9"))):
            assert "unknown" not in line and "is not known" not in line, line
            assert "is required" in line or "needs stage" in line or "is not allowed" in line, line


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("adamw_torch", {"optimizer.type": "AdamW"}),
        ("adamw_torch_fused", {"optimizer.type": "AdamW"}),
        ("adamw_hf", {"optimizer.type": "AdamW"}),
        ("torch.optim.AdamW", {"optimizer.type": "AdamW"}),
        ("FusedAdam", {"optimizer.type": "Adam"}),
        ("sgd", {"optimizer.type": "SGD"}),
        ("AdamW8bit", {"optimizer.type": "AdamW", "optimizer.params.state_dtype": "int8"}),
        ("adamw_torch_4bit", {"optimizer.type": "AdamW", "optimizer.params.state_dtype": "int8"}),
        ("lion_8bit", {"optimizer.type": "Lion", "optimizer.params.state_dtype": "int8"}),
        ("rmsprop_bnb_8bit", {"optimizer.type": "RMSprop"}),
        (
            "paged_adamw_8bit",
            {
                "optimizer.type": "AdamW",
                "optimizer.params.state_dtype": "int8",
                "zero_optimization.offload_optimizer.device": "cpu",
            },
        ),
        (
            "DeepSpeedCPUAdam",
            {"optimizer.type": "Adam", "zero_optimization.offload_optimizer.device": "cpu"},
        ),
        ("galore_adamw", {}),
        ("schedule_free_adamw", {}),
        ("", {}),
        (3, {}),
    ],
)
def test_other_names_of_optimizers(name: Any, written: dict[str, Any]) -> None:
    assert read_optimizer(name) == written


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cosine", "WarmupCosineLR"),
        ("linear", "WarmupDecayLR"),
        ("constant_with_warmup", "WarmupLR"),
        ("torch.optim.lr_scheduler.StepLR", "StepLR"),
        ("WSD", None),
    ],
)
def test_other_names_of_schedules(name: str, kind: str | None) -> None:
    assert read_scheduler(name).get("scheduler.type") == kind


@pytest.mark.parametrize(
    ("value", "stage"),
    [
        (3, 3), ("3", 3), ("zero2", 2), ("deepspeed_stage_3_offload", 3), ("FULL_SHARD", 3),
        ("full_shard auto_wrap", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("ddp", 0), ("greedy", None),
        (30, None), ("stage30", None), (None, None),
    ],
)  # fmt: skip
def test_stages_of_other_tools(value: Any, stage: int | None) -> None:
    assert read_stage(value) == stage


def test_a_common_word_is_a_wish_only_with_a_value_of_the_other_tool() -> None:
    assert problems({"strategy": "greedy"}) == [] == problems({"strategy": "ddp"})
    (line,) = problems({"strategy": "deepspeed_stage_2"})
    assert '"zero_optimization": {"stage": 2}' in line


def test_settings_in_a_section_of_another_tool() -> None:
    lines = problems({"trainer": {"precision": "bf16-mixed", "max_epochs": 3}, "training": {"seed": 1}})
    assert lines == [
        'trainer.precision: unknown key, use bf16.enabled: "bf16": {"enabled": true} '
        '("strict": false ignores unknown keys)'
    ]


def test_the_way_out_is_said_once() -> None:
    lines = problems({"zero_stage": 3, "fp8": True, "max_grad_norm": 1})
    assert ["strict" in line for line in lines] == [False, False, True]


def test_no_key_of_another_tool_is_taken_for_a_typo() -> None:
    """A wrong suggestion is worse than none: these have other names for a reason."""
    known = names(Config)
    tools = yaml.safe_load((DATA / "keys_of_other_tools.yaml").read_text(encoding="utf-8"))
    wrong = {
        (tool, key, said)
        for tool, keys in tools.items()
        for key in keys.split()
        if key not in known and ("did you mean" in (said := unknown(key, "", known, 2).text))
    }
    assert wrong == set()
