"""Test what the launcher says about a config before it starts anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zlaunch.cli.run import run

ROOT = Path(__file__).parents[3]
USERS = ("zlaunch", "deepspeed", "transformers", "accelerate")
Launch = Callable[..., tuple[int, str]]
GOOD = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return a function that asks the launcher for a script's plan, and gives its exit code and words."""
    monkeypatch.chdir(tmp_path)

    def start(
        *args: str,
        imports: str = "zlaunch",
        files: Mapping[str, Any] | None = None,
        options: Sequence[str] = ("--num_gpus", "4"),
    ) -> tuple[int, str]:
        Path("train.py").write_text(f"import {imports}\n")
        for name, content in (files or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            Path(name).write_text(text, encoding="utf-8")
        done = CliRunner().invoke(run, [*options, "--dry_run", "--json", "train.py", *args])
        return done.exit_code, done.stderr

    return start


def refused(launch: Launch, *args: str, **options: Any) -> str:
    code, said = launch(*args, **options)
    assert code == 2, said
    return said.split("Error: ", 1)[1].rstrip("\n")


@pytest.mark.parametrize("option", ["--deepspeed_config", "--deepspeed-config", "--deepspeed", "--config"])
@pytest.mark.parametrize("user", USERS)
def test_a_config_that_is_not_there(launch: Launch, option: str, user: str) -> None:
    said = refused(launch, option, "ds.json", imports=user, files={"dss.json": GOOD, "ds.txt": ""})
    assert said == f"{option}: ds.json: no such file, did you mean 'dss.json'?"
    said = refused(launch, option, "nope.json", imports=user, files={"e9.json": GOOD})
    assert said == f"{option}: nope.json: no such file"  # a suffix is no likeness
    said = refused(launch, f"{option}=no/such.yaml", imports=user)
    assert said == f"{option}: no/such.yaml: no such file"


@pytest.mark.parametrize("option", ["--deepspeed_config", "--config"])
@pytest.mark.parametrize("name", ["ds.json", "ds.yaml"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("\n  \n", "the file is empty"),
        ('{"a": 1,, ]', "line 1, column"),
        ("a: [1\nb: }", "line"),
    ],
)
def test_a_config_without_a_meaning(launch: Launch, option: str, name: str, text: str, expected: str) -> None:
    said = refused(launch, option, name, files={name: text})
    assert said.startswith(f"{option}: {name}: ") and expected in said and "\n" not in said


def test_a_config_of_a_script_that_reads_none(launch: Launch) -> None:
    """What such a script means by --config is its own business; by DeepSpeed's options it is not."""
    for imports in ("os", "torch"):
        code, said = launch("--config", "none.yaml", imports=imports)
        assert code == 0 and "warning: --config none.yaml: no such file" in said
        assert launch("--config", "own.yaml", imports=imports, files={"own.yaml": ""})[0] == 0
        assert "no such file" in refused(launch, "--deepspeed_config", "none.json", imports=imports)
    wrong = {**GOOD, "zero_optimization": {"overlap_com": True}}
    assert "did you mean overlap_comm?" in refused(
        launch, "--config", "ds.json", imports="torch", files={"ds.json": wrong}
    )


@pytest.mark.parametrize(
    "text",
    [
        "model: gpt\nlr: 3e-4\nepochs: 2\n",
        "stage: !mine {a: 1}\nmodel: ${name}\n",
        "model: {enabled: 3}\noptimizer: {name: adam}\ndata: x\nseed: 1\n",
    ],
)
def test_a_script_s_own_config_is_left_alone(launch: Launch, text: str) -> None:
    assert launch("--config", "own.yaml", imports="transformers", files={"own.yaml": text}) == (0, "")


@pytest.mark.parametrize("option", ["--deepspeed_config", "--deepspeed", "--config"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"train_batch_size": 8}, "8 is less than train_micro_batch_size_per_gpu 4 * world size 4"),
        (
            {"train_batch_size": 33, "gradient_accumulation_steps": 2},
            "33 is not train_micro_batch_size_per_gpu 4",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not allowed"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            '"cpu" needs stage 1, 2 or 3, not 0',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param.nvme_path: is required",
        ),
    ],
)
def test_mistakes_inside(launch: Launch, option: str, change: dict[str, Any], expected: str) -> None:
    said = refused(launch, option, "ds.json", files={"ds.json": {**GOOD, **change}})
    assert said.startswith("ds.json is not a valid config:\nds.json: ") and expected in said


def test_what_others_fill_in_is_left_open(launch: Launch) -> None:
    source = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    assert launch("--deepspeed", "ds.json", imports="transformers", files={"ds.json": source}) == (0, "")
    assert launch("--deepspeed", "ds.json", files={"ds.json": {"zero_optimization": True}}) == (0, "")


def test_a_config_that_the_trainer_cannot_read_is_refused_before_it_reads_it(launch: Launch) -> None:
    text = '{"train_batch_size": 8, // mine\n "zero_optimization": {"stage": 3,}}'
    files: dict[str, Any] = {"ds.json": text}
    trainer = "os\nfrom transformers import HfArgumentParser, Trainer"
    said = refused(launch, "--deepspeed", "ds.json", imports=trainer, files=files)
    assert said.startswith("--deepspeed ds.json: the Hugging Face Trainer reads plain JSON")
    # our own reader takes it, whoever else is imported
    for option, user in (("--config", "zlaunch"), ("--deepspeed", "zlaunch, transformers")):
        assert launch(option, "ds.json", imports=user, files=files) == (0, "")
    # what nobody can read is named by its line
    broken = {"ds.json": '{"train_batch_size": 8,\n "zero_optimization": {'}
    assert "line" in refused(launch, "--deepspeed", "ds.json", imports=trainer, files=broken)


@pytest.mark.parametrize("user", USERS)
def test_the_plan_says_that_no_config_was_checked(launch: Launch, user: str) -> None:
    """The script may name one itself, as TrainingArguments(deepspeed="ds.json") does."""
    note = "no config among the script's arguments, so none was checked"
    assert note in launch(imports=user)[1]
    assert note not in launch("--deepspeed", "ds.json", imports=user, files={"ds.json": GOOD})[1]
    assert note not in launch(imports="json")[1]


def test_warnings_belong_to_the_plan(launch: Launch) -> None:
    code, said = launch("--config", "ds.json", files={"ds.json": {**GOOD, "_note": 1}})
    assert (code, said) == (0, "zlaunch: warning: ds.json: _note: unknown key, ignored\n")


def test_the_config_of_another_folder(launch: Launch, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "train.py").write_text("import zlaunch\n")
    (inner / "ds.json").write_text(json.dumps({**GOOD, "train_batch_size": 8}))
    options = ("--num_gpus", "4", "--workdir", "inner")
    assert "8 is less than" in refused(launch, "--config", "ds.json", options=options)
    assert "no such file, did you mean 'inner/ds.json'?" in refused(
        launch, "--config", "dss.json", options=options
    )


def test_no_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import zlaunch\n")
    (tmp_path / "ds.json").write_text(json.dumps({**GOOD, "train_batch_size": 8}))
    code = (
        "import sys\nfrom zlaunch.plan.checks import check_configs\n"
        "try:\n    check_configs(['train.py', '--config', 'ds.json'], world_sizes=(4,))\n"
        "except Exception as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "8 is less than" in done.stdout and done.stdout.endswith("False\n")


def test_a_config_is_checked_for_all_nodes_where_this_launches_one(launch: Launch) -> None:
    sizes = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    nodes = ("--num_gpus=1", "--num_nodes=3", "--node_rank=1", "--master_addr=localhost")
    code, said = launch("--config", "ds.json", files={"ds.json": sizes}, options=nodes)
    assert code == 0, said
    assert "6" in refused(launch, "--config", "ds.json", options=("--num_nodes=2", *nodes[:1], *nodes[2:]))
