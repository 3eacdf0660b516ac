"""Test what `zlaunch init` asks for and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from zlaunch.cli.init import init
from zlaunch.cli.main import main
from zlaunch.runtime.config import json_schema, load

GIVEN = {"--script": "train.py", "--gpus": "2x8", "--gpu_mem": "80", "--params": "7B", "--batch": "256"}


def words(**changes: str) -> list[str]:
    return [
        word for option in ({**GIVEN, **{f"--{k}": v for k, v in changes.items()}}).items() for word in option
    ]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_it_asks_five_questions(tmp_path: Path) -> None:
    result = CliRunner().invoke(init, [], input="train.py\n2x8\n80\n7B\n256\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("[") == 5
    config = load("ds.json").config
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (256, 2)
    assert config.zero_optimization.stage == 1 and config.bf16.enabled
    assert "hosts: write one line for each of the 2 nodes: NAME slots=8" in result.output
    assert "then: zlaunch --hostfile hosts --num_gpus 8 train.py --config ds.json" in result.output


def test_answers_are_options_and_slurm_gets_a_batch_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words(), "--partition", "gpu", "--time", "10", "--config", "a.json"]) == 0
    out = capsys.readouterr().out
    assert "[" not in out and "micro-batch 2" in out
    assert out.endswith("a.sbatch: runs zlaunch train.py --config a.json\nthen: sbatch a.sbatch\n")
    lines = Path("a.sbatch").read_text().splitlines()
    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=10"):
        assert f"#SBATCH {line}" in lines
    assert lines[-1] == "exec zlaunch train.py --config a.json"


def test_the_micro_batch_is_the_largest_that_fits_the_fastest_stage() -> None:
    found = {}
    for gib in ("24", "40", "80"):
        assert main(["init", *words(params="1B", gpus="8", gpu_mem=gib), "--force"]) == 0
        config = load("ds.json").config
        found[gib] = (config.zero_optimization.stage, config.train_micro_batch_size_per_gpu)
    assert found == {"24": (0, 1), "40": (0, 4), "80": (0, 16)}
    assert main(["init", *words(params="1B", gpus="8", batch="24"), "--force"]) == 0
    assert load("ds.json").config.train_micro_batch_size_per_gpu == 3, "it divides the samples of a GPU"


def test_nodes_and_gpus_have_the_names_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    given = {name: value for name, value in GIVEN.items() if name != "--gpus"}
    rest = [word for option in given.items() for word in option]
    assert main(["init", *rest, "--num_gpus", "8", "--num-nodes", "2"]) == 0
    assert "zlaunch --hostfile hosts --num_gpus 8 train.py" in capsys.readouterr().out
    assert main(["init", *rest, "--num_gpus", "2x8", "--num_nodes", "4", "--force"]) == 2
    assert "--num_gpus 2x8 and --num_nodes 4 contradict each other" in capsys.readouterr().err


@pytest.mark.parametrize("params", ["0", "100K", "50M", "350M", "13B"])
def test_models_of_any_size(params: str) -> None:
    assert main(["init", *words(params=params, gpus="8", batch="8")]) == 0
    assert load("ds.json").config.train_batch_size == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": "many"}, "'many' GPUs: write a number, or 2x8"),
        ({"gpus": "0"}, "'0' GPUs: write a number"),
        ({"params": "seven"}, "'seven' is not a number of at least 1, such as 13e9 or 13B"),
        ({"batch": "100"}, "100 samples are not a multiple of 16 GPUs: use 96 or 112"),
        ({"params": "900T"}, "does not fit on 16 GPUs of 80 GiB"),
        ({"time": "soon"}, "--time 'soon': write it as 90"),
        ({"config": "none/ds.json"}, "none/ds.json: cannot be written: No such file"),
    ],
)
def test_mistakes(changes: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words(**changes)]) == 2
    assert said in capsys.readouterr().err and not list(Path().iterdir())


def test_nothing_is_overwritten_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text("mine")
    assert main(["init", *words()]) == 2
    assert (
        "ds.json exists: overwrite it with --force" in capsys.readouterr().err
        and Path("ds.json").read_text() == "mine"
    )
    assert main(["init", *words(), "--force"]) == 0 and load("ds.json").config.bf16.enabled


def test_editors_find_the_schema_beside_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").mkdir()
    assert main(["init", *words(params="0"), "--config", "configs/a.json"]) == 0
    assert (
        "configs/zlaunch.schema.json: lets editors such as VS Code check and complete a.json"
        in capsys.readouterr().out
    )
    loaded = load("configs/a.json")
    assert not loaded.warnings and loaded.raw["$schema"] == "./zlaunch.schema.json"
    assert json.loads(Path("configs/zlaunch.schema.json").read_text()) == json_schema()


FLAGS = "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --bf16 true"


@pytest.mark.parametrize(
    ("source", "more", "then"),
    [
        ("from transformers import HfArgumentParser, Trainer", (), f"train.py --deepspeed ds.json {FLAGS}"),
        ("import transformers\ntransformers.Trainer()", (), "train.py"),
        ("import transformers as tf\ntf.Trainer()", (), "train.py"),
        ("import transformers.trainer\ntransformers.trainer.Trainer()", (), "train.py"),
        ("import torch as tf\ntf.Trainer()", (), "train.py --config ds.json"),
        ("from trl import SFTTrainer, TrlParser", (), f"train.py --deepspeed ds.json {FLAGS}"),
        ("import torch", ("--trainer",), f"train.py --deepspeed ds.json {FLAGS}"),
        ("from transformers import Trainer", ("--no-trainer",), "train.py --config ds.json"),
        ("from transformers import AutoModel", (), "train.py --config ds.json"),
        ("from transformers import Trainer(", (), "train.py --config ds.json"),
    ],
)
def test_the_trainer_gets_a_config_that_it_fills_in(
    source: str, more: tuple[str, ...], then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(source)
    assert main(["init", *words(), *more]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"then: zlaunch --hostfile hosts --num_gpus 8 {then}\n")
    text = Path("ds.json").read_text()
    if "--config" in then:
        assert "//" in text and '"auto"' not in text
        return
    config = json.loads(text)  # accelerate reads no comments
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert {config[key] for key in keys} == {"auto"} and "train_batch_size" not in config
    assert set(config["optimizer"]["params"].values()) == {"auto"}
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}  # for a stage that is changed by hand
    assert config["zero_optimization"] == {"stage": 1, **gathers} and not load("ds.json").dropped
    in_code = 'deepspeed="ds.json", per_device_train_batch_size=2, gradient_accumulation_steps=8, bf16=True'
    assert (f"train.py: set TrainingArguments({in_code})" in out) is (then == "train.py")


def test_the_batch_file_of_a_trainer_has_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("from transformers import HfArgumentParser, Trainer")
    assert main(["init", *words(), "--partition", "gpu", "--time", "10"]) == 0
    last = Path("ds.sbatch").read_text().splitlines()[-1]
    assert last == f"exec zlaunch train.py --deepspeed ds.json {FLAGS}"
    said = f"ds.sbatch: runs zlaunch train.py --deepspeed ds.json {FLAGS}\nthen: sbatch ds.sbatch\n"
    assert capsys.readouterr().out.endswith(said)


def test_a_script_of_deepspeed_gets_the_option_that_it_parses(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import deepspeed\nparser = deepspeed.add_config_arguments(parser)\n")
    assert main(["init", *words(), "--force"]) == 0
    assert capsys.readouterr().out.endswith("train.py --deepspeed --deepspeed_config ds.json\n")


def test_what_it_needs_is_said_and_the_hosts_memory_counts(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for host in ("", "256"):
        more = ("--host_mem", host) if host else ()
        assert main(["init", *words(gpus="4", gpu_mem="24"), *more, "--force"]) == 0
        said[host] = capsys.readouterr().out.splitlines()[0]
    assert "GiB of GPU memory per rank and" in said[""] and "host memory was not checked" in said[""]
    assert load("ds.json").config.zero_optimization.offload_optimizer is not None
    assert "of host memory per node" in said["256"] and "not checked" not in said["256"]
    assert main(["init", *words(gpus="8", gpu_mem="24"), "--host_mem", "64", "--force"]) == 0
    said["64"] = capsys.readouterr().out.splitlines()[0]
    assert "host memory" not in said["64"] and "offload" not in said["64"]
    assert main(["init", *words(gpus="1", params="70T"), "--host_mem", "8", "--force"]) == 2
    assert "with any stage or offload to 8 GiB a node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "answers", "missing"),
    [
        ([], "", "--script, --num_gpus, --gpu_mem, --params, --batch"),
        (["--script", "train.py", "--gpu_mem", "80"], "8\n", "--num_gpus, --params, --batch"),
    ],
)
def test_without_answers_it_names_the_options(given: list[str], answers: str, missing: str) -> None:
    result = CliRunner().invoke(init, given, input=answers)
    assert result.exit_code == 2
    assert f"stdin ended before all questions were answered: give {missing}\n" in result.stderr
    assert not Path("ds.json").exists()
