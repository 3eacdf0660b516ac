"""Test reading configs: forms, syntax, messages, support levels, and the generated reference."""

from __future__ import annotations

import base64
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from zlaunch.cli.config import config as cli
from zlaunch.runtime.config import Config, ConfigError, json_schema, load
from zlaunch.runtime.config.reference import markdown

ROOT = Path(__file__).parents[3]


def problems(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


COMMENTED = """
{
  // a comment
  "train_batch_size": 8, # another
  /* and
     one more */
  "wandb": {"project": "a // b # c /* d */"},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8,},
}
"""


def test_json_with_comments(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, "ds.json", COMMENTED))
    assert loaded.origin == "ds.json"
    assert loaded.config.train_batch_size == 8
    assert loaded.raw["wandb"]["project"] == "a // b # c /* d */"
    assert loaded.config.zero_optimization.reduce_bucket_size == 500_000_000
    assert loaded.given == {
        "train_batch_size",
        "wandb.project",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
    }
    assert loaded.raw["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 5e8}


def test_all_forms_agree(tmp_path: Path) -> None:
    value = {
        "train_batch_size": 8,
        "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
    }
    text = json.dumps(value)
    yaml = (
        "train_batch_size: 8\nfp16:\n  enabled: true\noptimizer:\n  type: Adam\n  params: {lr: 1e-5}\n"
        "zero_optimization: {reduce_bucket_size: 5e8}\n"
    )
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    configs = [
        load(source).config
        for source in (
            value,
            str(write(tmp_path, "a.json", text)),
            write(tmp_path, "a.yaml", yaml),
            encoded,
            encoded.rstrip("="),
        )
    ]
    assert all(config == configs[0] for config in configs)
    assert load(value).origin == "<dict>"
    assert load(encoded).origin == "<base64>"


def test_defaults_are_deepspeeds() -> None:
    config = load({}).config
    assert config == Config()
    assert config.gradient_clipping == 1.0
    zero = config.zero_optimization
    assert (zero.stage, zero.overlap_comm, zero.sub_group_size) == (0, None, 10**9)
    assert zero.stage3_param_persistence_threshold == 100_000
    assert zero.stage3_model_persistence_threshold == sys.maxsize
    assert config.fp16.initial_scale_power == 16 and config.fp16.hysteresis == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": tru\n}', "line 2, column 8"),
        ('{"a": 1', 'line 1, column 8: expected "," or "}"'),
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ('{"a": 01}', "line 1, column 7"),
        ("{'a': 1}", "key in double quotes"),
        ('{"a": "x\n"}', "line 1"),
        ("/* open", "never closed"),
        ("[" * 5000, "nested more than"),
        ('{"a": ' + "9" * 5000 + "}", "too long"),
        ("{} {}", "after the end"),
    ],
)
def test_json_syntax_errors(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, "bad.json", text)
    message = problems(path)
    assert expected in message and message.startswith(str(path))


def test_keys_without_quotes_are_hjson(tmp_path: Path) -> None:
    text = """
    {
      # counted in sequences
      train_batch_size: 8
      optimizer: {type: "AdamW", params: {lr: 0.001}}
      fp16:
      {
        enabled: true
      }
      wall_clock_breakdown: false
    }
    """
    loaded = load(write(tmp_path, "ds.json", text))
    assert (loaded.config.train_batch_size, loaded.config.fp16.enabled) == (8, True)
    assert loaded.config.optimizer is not None and loaded.config.optimizer.params["lr"] == 0.001
    bare = load(write(tmp_path, "bare.json", "# no braces\ntrain_batch_size: 4\nfp16: {enabled: false}"))
    assert bare.config.train_batch_size == 4
    twice = problems(write(tmp_path, "twice.json", "{\n  fp16: {enabled: true}\n  fp16: {enabled: false}\n}"))
    assert "fp16: key is given twice" in twice
    deep = "{\n  fp16: {enabled: true}\n  bf16:\n  {\n    enabled: false\n    enabled: false\n  }\n}"
    assert "bf16.enabled: key is given twice" in problems(write(tmp_path, "deep.json", deep))
    comma = problems(
        write(tmp_path, "comma.json", "{\n  train_batch_size: 2\n  wandb: {\n  team: a, \n  }\n}")
    )
    assert "wandb.team: 'a,' is one text: Hjson reads text without quotes up to the end" in comma
    wrong = problems(write(tmp_path, "wrong.json", "{\n  train_batch_size: [1\n}"))
    assert 'line 2, column 3: expected a key in double quotes or "}"; as Hjson: line 3, column 1:' in wrong
    for text in ("{\n  gradient_clipping: 1e400\n}", "{ a: 1 /* open", "{a: '''", f"{{a: {'9' * 5000}\n}}"):
        assert "; as Hjson: " in problems(write(tmp_path, "odd.json", text))


def test_hjson_is_named_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert "pip install hjson" in problems(write(tmp_path, "ds.json", "{\n  train_batch_size: 8\n}"))


def test_yaml_syntax_and_types(tmp_path: Path) -> None:
    assert "bad.yaml: line 2, column" in problems(write(tmp_path, "bad.yaml", "a: [1\nb: }"))
    message = problems(write(tmp_path, "b.yml", "fp16:\n  enabled: yes\n"))
    assert message == 'b.yml: fp16.enabled: "yes" is not allowed, expected true'
    assert "the file is empty" in problems(write(tmp_path, "c.yaml", ""))
    assert "at the top" in problems(write(tmp_path, "c.yaml", "# only a comment"))
    assert "nested too deeply" in problems(write(tmp_path, "d.yaml", "amp: &a\n  x: *a\n"))
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 30)
    )
    assert "too many values" in problems(write(tmp_path, "bomb.yaml", bomb))
    assert problems(write(tmp_path, "e.yaml", "a: !!python/object:os.system x\n"))


def test_yaml_reads_no_number_in_base_60(tmp_path: Path) -> None:
    text = "train_batch_size: 1:30\ngradient_clipping: 1:30.5\nsteps_per_print: 90\n"
    assert problems(write(tmp_path, "a.yaml", text)).splitlines() == [
        'a.yaml: train_batch_size: "1:30" is not allowed, expected a whole number, 1 or more',
        'a.yaml: gradient_clipping: "1:30.5" is not allowed, expected a number, 0 or more',
    ]


def test_booleans_of_numpy() -> None:
    config = load({"fp16": {"enabled": np.bool_(True)}, "bf16": {"enabled": np.False_}}).config
    assert config.fp16.enabled is True and config.bf16.enabled is False
    assert "not ndarray" in problems({"fp16": {"enabled": np.array([True])}})


def test_an_error_keeps_its_parts_when_it_is_sent() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 0, "fp16": 3, "own_key": 1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems and len(again.problems) == 2
    assert again.warnings == ("<dict>: own_key: unknown key, ignored",) and str(again) == str(caught.value)


def test_duplicate_keys(tmp_path: Path) -> None:
    text = '{"zero_optimization": {\n"stage": 1,\n"stage": 2}}'
    message = problems(write(tmp_path, "ds.json", text))
    assert message == "ds.json: zero_optimization.stage: key is given twice (line 3, column 1)"
    message = problems(write(tmp_path, "ds.yaml", "fp16:\n  enabled: true\n  enabled: false\n"))
    assert message == "ds.yaml: fp16.enabled: key is given twice (line 3)"
    assert "given twice" in problems({"bf16": {}, "bfloat16": {}})


def test_unreadable_sources(tmp_path: Path) -> None:
    assert "no such file" in problems(tmp_path / "none.json")
    assert "no such file" in problems("nothing")
    assert "no such file" in problems("a\0b")
    assert "no such file" in problems("x" * 10_000)
    assert "this is a folder, expected a JSON or YAML file" in problems(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    assert "not UTF-8" in problems(tmp_path / "latin.json")
    assert "<base64>: line 1" in problems(base64.urlsafe_b64encode(b'{"a" 1}').decode())
    for odd in (None, 3, [1], b"{}", object()):
        assert "expected a path" in problems(odd)


def test_every_problem_is_named(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "zero_optimization": {"stage": 4, "overlap_com": True},
            "gradient_clipping": -1,
            "stage3_max_live_parameters": 3,
            "fp16": {"enabled": 1},
        }
    )
    assert problems(write(tmp_path, "ds.json", text)).splitlines() == [
        "ds.json: zero_optimization.overlap_com: unknown key, did you mean overlap_comm?",
        "ds.json: stage3_max_live_parameters: unknown key here, it belongs in zero_optimization: "
        '"zero_optimization": {"stage3_max_live_parameters": 3}',
        "ds.json: gradient_clipping: -1 is not allowed, expected a number, 0 or more",
        "ds.json: zero_optimization.stage: 4 is not allowed, expected one of 0, 1, 2, 3",
        "ds.json: fp16.enabled: 1 is not allowed, expected true or false",
    ]


@pytest.mark.parametrize("value", [5e8, "5e8", 500_000_000, "500000000", 500_000_000.7])
def test_sizes(value: Any) -> None:
    assert (
        load({"zero_optimization": {"reduce_bucket_size": value}}).config.zero_optimization.reduce_bucket_size
        == 5e8
    )


@pytest.mark.parametrize(
    "value", [True, -1, "many", None, [], {}, math.nan, math.inf, "0x10", "nan", 10**400]
)
def test_bad_sizes(value: Any) -> None:
    assert "zero_optimization.reduce_bucket_size" in problems(
        {"zero_optimization": {"reduce_bucket_size": value}}
    )


def test_counts() -> None:
    assert load({"train_batch_size": 8.0}).config.train_batch_size == 8
    for value in (8.5, 0, -1, True, "eight", 10**30, math.inf):
        assert "expected a whole number, 1 or more" in problems({"train_batch_size": value})
    assert load({"steps_per_print": math.inf}).config.steps_per_print is None
    assert load({"steps_per_print": "inf"}).config.steps_per_print is None
    assert load({"steps_per_print": 10}).config.steps_per_print == 10
    assert load({"zero_optimization": {"stage3_max_live_parameters": 1e30}}).config
    assert "expected one of" in problems({"zero_optimization": {"stage": True}})


def test_aliases_and_dtypes() -> None:
    loaded = load(
        {
            "bfloat16": {"enabled": True, "check_overflow": False},
            "zero_optimization": {"prefetch_bucket_size": 7},
            "communication_data_type": "torch.float32",
        }
    )
    assert loaded.config.bf16.enabled and not loaded.config.bf16.check_grad_overflow
    assert loaded.config.zero_optimization.stage3_prefetch_bucket_size == 7
    assert loaded.config.communication_data_type == "fp32"
    assert "bf16.enabled" in loaded.given
    assert "expected one of fp16, bf16, fp32" in problems({"communication_data_type": "int8"})


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"graph_harvesting": True}, "graph_harvesting"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled"),
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
        ({"activation_checkpointing": {"profile": True}}, "activation_checkpointing.profile"),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
            "checkpoint.parallel_write.pipeline_stage",
        ),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, "checkpoint.writer.type"),
    ],
)
def test_warned(source: dict[str, Any], path: str) -> None:
    loaded = load(source)
    assert [line.split(": ")[1] for line in loaded.warnings] == [path]
    assert "ignored" in loaded.warnings[0]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow"),
        (
            {"zero_optimization": {"mics_hierarchical_params_gather": True}},
            "zero_optimization.mics_hierarchical_params_gather",
        ),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled"),
        ({"amp": {"enabled": True, "max_loss_scale": 2.0}}, "amp.max_loss_scale"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        ({"compression_training": {"x": 1}}, "compression_training"),
        ({"optimizer": {"type": "MuAdam"}}, "optimizer.type"),
        (
            {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}},
            "optimizer.params.fp32_optimizer_states",
        ),
    ],
)
def test_refused(source: dict[str, Any], path: str) -> None:
    lines = problems(source).splitlines()
    assert len(lines) == 1 and lines[0].split(": ")[1] == path and "not supported yet" in lines[0]


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": False}}},
        {
            "zero_optimization": {
                "offload_param": None,
                "cpu_offload": False,
                "leaf_module": {"classes": ["A"]},
            }
        },
        {
            "amp": {"enabled": False, "opt_level": "O2", "num_losses": 2},
            "torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["torch.nn.Linear"]},
            "wandb": {"enabled": False, "team": "x"},
            "fp16": None,
        },
        {"elasticity": {"enabled": False, "min_gpus": 2}, "data_types": {"grad_accum_dtype": "float32"}},
        {"progressive_layer_drop": {"enabled": False}, "sparse_attention": {}},
    ],
)
def test_switched_off_says_nothing(source: dict[str, Any]) -> None:
    assert load(source).warnings == ()


def test_optimizer_and_scheduler() -> None:
    loaded = load(
        {
            "optimizer": {
                "type": "adamw",
                "params": {"lr": "3e-4", "betas": [0.9, 0.95], "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": "1e3", "warmup_max_lr": "auto"},
            },
        }
    )
    optimizer, scheduler = loaded.config.optimizer, loaded.config.scheduler
    assert optimizer is not None and scheduler is not None
    assert optimizer.type == "AdamW"
    assert optimizer.params == {"lr": 3e-4, "betas": [0.9, 0.95]}
    assert scheduler.params == {"total_num_steps": 1000}
    assert loaded.auto == {"optimizer.params.weight_decay", "scheduler.params.warmup_max_lr"}
    free = load({"optimizer": {"type": "RMSprop", "params": {"lr": "1e-5", "centered": True}}})
    assert free.config.optimizer is not None
    assert free.config.optimizer.params == {"lr": 1e-5, "centered": True}
    assert load({"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}).config.scheduler


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer", {"type": "Adam", "params": {"max_grad_norm": 1.0}}, "gradient_clipping"),
        ("optimizer", {"type": "Adam", "params": {"weight_decy": 1.0}}, "did you mean weight_decay?"),
        ("optimizer", {"type": "AdamW", "params": {"learning_rate": 1.0}}, "unknown key, did you mean lr?"),
        ("optimizer", {"type": "Lion", "params": {"learningRate": 1.0}}, "unknown key, did you mean lr?"),
        ("parallel", {"tp": 2}, "tp: unknown key, did you mean tensor?"),
        ("optimizer", {"type": "SGD", "params": {"momentun": 1.0}}, "did you mean momentum?"),
        ("optimizer", {"type": "Adam", "params": {"betas": [0.9, 1.0]}}, "two numbers"),
        ("optimizer", {"type": "Adam", "params": {"lr": -1}}, "optimizer.params.lr: -1 is not allowed"),
        ("optimizer", {"type": "AdmaW"}, "did you mean AdamW?"),
        ("optimizer", {"params": {}}, "optimizer.type: is required"),
        (
            "optimizer",
            {"type": "Adam", "params": [1]},
            "optimizer.params: [1] is not allowed, expected an object",
        ),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_min": 0}}, "did you mean warmup_min_lr?"),
        ("scheduler", {"type": "WarmupDecayLR", "params": {}}, "total_num_steps: is required"),
        ("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, "cycle_max_lr: is required"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}, "whole number"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_type": 3}}, "expected one of log, linear"),
        ("scheduler", {"type": "LambdaLR"}, "not supported yet"),
    ],
)
def test_bad_optimizer_or_scheduler(key: str, value: Any, expected: str) -> None:
    assert expected in problems({key: value})


def test_rates_and_momenta_for_each_group() -> None:
    params = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1, "cycle_min_mom": [0.5, 0.6]}
    loaded = load({"scheduler": {"type": "OneCycle", "params": params}})
    assert loaded.config.scheduler is not None
    found = loaded.config.scheduler.params
    assert (found["cycle_min_lr"], found["cycle_max_lr"], found["cycle_min_mom"]) == (
        [0.1, 0.2],
        1.0,
        [0.5, 0.6],
    )
    wrong = problems({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, -1]}}})
    assert "expected a number, 0 or more, or a list of one for each param group" in wrong


def test_an_unknown_warmup_curve_is_the_default_with_a_warning() -> None:
    params = {"warmup_type": "cosine", "warmup_num_steps": 3}
    loaded = load({"scheduler": {"type": "WarmupLR", "params": params}})
    assert loaded.config.scheduler is not None
    assert loaded.config.scheduler.params["warmup_type"] == "log" and params["warmup_type"] == "cosine"
    assert any('warmup_type: "cosine" is taken as "log"' in warning for warning in loaded.warnings)


def test_cross_checks() -> None:
    assert "both enabled" in problems({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "stage 3" in problems({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}})
    sums = {"data_types": {"grad_accum_dtype": "bf16"}}
    assert 'grad_accum_dtype: "bf16" contradicts training in fp32: expected "fp32"' in problems(sums)
    assert 'expected "fp32" or "fp16"' in problems({**sums, "fp16": {"enabled": True}})
    bf16 = {"enabled": True, "master_weights": "stochastic"}
    assert "needs bf16.enabled" in problems({"bf16": {**bf16, "enabled": False}})
    nvme = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    assert "gradients on NVMe are fp32" in problems({**sums, "bf16": bf16, "zero_optimization": nvme})
    assert "expected one of fp32, stochastic" in problems({"bf16": {**bf16, "master_weights": "nearest"}})
    fp16 = {"data_types": {"param_dtype": "bf16"}, "fp16": {"enabled": True}}
    assert "contradicts the training dtype" in problems(fp16)
    # A wrong value elsewhere does not hide them.
    both = problems({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "train_batch_size": -1})
    assert len(both.splitlines()) == 2


def test_not_strict() -> None:
    source = {"strict": False, "future": 1, "fp16": {"enabled": True, "new": 2}}
    loaded = load(source)
    assert loaded.config.fp16.enabled and len(loaded.warnings) == 2
    assert len(problems({**source, "strict": True}).splitlines()) == 2
    assert "gradient_clipping" in problems({**source, "gradient_clipping": "x"})


def test_auto_is_listed_and_stripped() -> None:
    loaded = load({"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "pipeline": {"stages": "auto"}})
    assert loaded.auto == {"train_batch_size", "fp16.enabled"}
    assert loaded.given == {"pipeline.stages"}
    assert "expected an object" in problems({"zero_optimization": "auto"})


def test_nothing_imports_torch() -> None:
    code = "import sys, zlaunch.runtime.config as c; c.load({}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_and_loading_parses_no_source() -> None:
    """Descriptions of keys are read from the source, which took more than half of each import's time."""
    code = (
        "import ast; parsed = []; ast.parse = lambda *args, **kwargs: parsed.append(args)\n"
        "import zlaunch.runtime.config as c; c.load({}); print(len(parsed))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_schema_and_reference_cover_every_key() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["gradient_clipping"]["description"]
    assert {"const": "auto"} in schema["properties"]["train_batch_size"]["anyOf"]
    assert "prefetch_bucket_size" in schema["$defs"]["Zero"]["properties"]
    json.dumps(schema)
    for part in (schema, *schema["$defs"].values()):
        for key, prop in part["properties"].items():
            assert "$ref" in prop or prop.get("description"), key
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == markdown()


def test_what_has_no_end_is_no_config() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: is larger than 16 MiB"):
        load("/dev/zero")


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    good = str(write(tmp_path, "ds.json", '{"train_batch_size": 8, "graph_harvesting": true}'))
    done = run(cli, ["check", good])
    assert (
        done.exit_code == 0 and "ds.json: ok" in done.output and "warning: ds.json: graph_harv" in done.output
    )
    assert run(cli, ["check", good, "--world_size", "3"]).exit_code == 2
    open_ = str(write(tmp_path, "open.json", '{"train_batch_size": 8, "gradient_clipping": "auto"}'))
    done = run(cli, ["check", open_])
    said = 'open.json: ok for the Hugging Face Trainer and accelerate, which fill in "auto"; for your own '
    loop = "loop, set gradient_clipping to a number, the maximum gradient norm (0 is off)"
    assert done.exit_code == 0 and done.output == f"{said}{loop}\n", "no warning contradicts it"
    assert "gradient_clipping: only the Hugging Face Trainer" in run(cli, ["show", open_]).output
    bad = str(write(tmp_path, "bad.json", '{"fp17": {}}'))
    done = run(cli, ["check", bad])
    assert done.exit_code == 2 and "bad.json: fp17: unknown key, did you mean fp16?" in done.output
    both = str(write(tmp_path, "both.json", '{"fp16": 3, "my_key": 1, "graph_harvesting": true}'))
    lines = run(cli, ["check", both]).output.splitlines()
    assert [line.partition(": both.json: ")[2] for line in lines[:2]] == [
        "my_key: unknown key, ignored",
        "graph_harvesting: not supported yet, ignored (it changes only speed or diagnostics)",
    ]
    assert lines[2].startswith("both.json: fp16: 3 is not allowed")
    assert json.loads(run(cli, ["schema"]).output)["title"] == "Config"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (
            {
                "optimizer": {"type": "Lamb"},
                "zero_optimization": {"stage": 2, "step_in_backward": True},
            },
            "zero_optimization.step_in_backward",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"state_dtype": "int8", "amsgrad": True}}},
            "optimizer.params.state_dtype",
        ),
        (
            {"optimizer": {"type": "RMSprop", "params": {"state_dtype": "int8"}}},
            "optimizer.params.state_dtype",
        ),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"state_dtype": "bf16"}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            },
            "optimizer.params.state_dtype",
        ),
        (
            {
                "optimizer": {"type": "OneBitLamb"},
                "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
            },
            "zero_optimization.zero_quantized_gradients",
        ),
        (
            {
                "optimizer": {"type": "OneBitAdam"},
                "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
            },
            "zero_optimization.zero_hpz_partition_size",
        ),
        (
            {
                "optimizer": {"type": "ZeroOneAdam", "params": {"local_step_clipper": 16}},
                "zero_optimization": {"stage": 1},
            },
            "optimizer.params.local_step_clipper",
        ),
        *(
            ({"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}, **more}, path)
            for kind, params, more, path in (
                ("Muon", {"state_dtype": "int8"}, {}, "optimizer.params.state_dtype"),
                ("Lion", {"state_dtype": "fp8"}, {}, "optimizer.params.state_dtype"),
                ("SGD", {"state_dtype": "int8"}, {}, "optimizer.params.state_dtype"),
                (
                    *("Lamb", {}, {"bf16": {"enabled": True, "master_weights": "stochastic"}}),
                    "bf16.master_weights",
                ),
                ("OneBitAdam", {}, {"parallel": {"tensor": 2}}, "optimizer.type"),
                ("Muon", {}, {"parallel": {"pipeline": 2}}, "optimizer.type"),
                ("adamw_8bit", {}, {}, "optimizer.type"),
            )
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False, "amsgrad": True}}},
            "optimizer.params.bias_correction",
        ),
        ({"autocast": {"enabled": True}}, "autocast"),
        ({"allow_tf32": True}, "allow_tf32"),
    ],
)
def test_pairs_of_keys_that_an_optimizer_refuses(source: dict[str, Any], path: str) -> None:
    lines = problems(source).splitlines()
    assert len(lines) == 1 and lines[0].split(": ")[1] == path


@pytest.mark.parametrize(
    ("stage", "given", "wanted"), [(0, {}, 16), (0, {"local_step_clipper": None}, 16), (1, {}, 1)]
)
def test_the_most_local_steps_are_deepspeeds_where_there_may_be_any(
    stage: int, given: dict[str, Any], wanted: int
) -> None:
    optimizer = {"type": "ZeroOneAdam", "params": given}
    loaded = load({"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": {"stage": stage}})
    assert loaded.config.optimizer is not None
    assert loaded.config.optimizer.params["local_step_clipper"] == wanted


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"eps": 1e-8}, "optimizer.params.eps: 1e-08 is not allowed, expected two numbers of 0 or more"),
        ({"eps": [1e-3, None]}, "optimizer.params.eps"),
        ({"eps": ["small", 1e-3]}, "optimizer.params.eps"),
        ({"betas": [0.9, 0.999]}, "optimizer.params.betas"),
        ({"relative_step": True}, "optimizer.params.relative_step"),
    ],
)
def test_adafactor_has_arguments_of_its_own(params: dict[str, Any], said: str) -> None:
    assert said in problems({"optimizer": {"type": "Adafactor", "params": params}})
    good = {"lr": 0.1, "eps": [None, 0.5], "d": 2, "beta2_decay": -0.5}
    loaded = load({"optimizer": {"type": "adafactor", "params": good}})
    assert loaded.config.optimizer is not None and loaded.config.optimizer.params["eps"] == [None, 0.5]


def test_what_always_holds_of_an_optimizer_is_told() -> None:
    params = {"cuda_aware": True, "comm_backend_name": "mpi", "state_dtype": "fp32"}
    loaded = load({"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": params}})
    said = "\n".join(map(str, loaded.warnings))
    assert "optimizer.params.cuda_aware" in said and "optimizer.params.comm_backend_name" in said
    assert "state_dtype" not in said and loaded.config.optimizer is not None
    assert "state_dtype" not in loaded.config.optimizer.params
