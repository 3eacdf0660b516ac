"""Test the Hugging Face Trainer, accelerate and PEFT over the alias, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, run
from tests.limits import LIMIT_S
from tests.ports import reserved_port
from zlaunch.view.progress import RunProgress

HERE = Path(__file__).parent
SCENES = {
    1: ("resume", "precision", "whose_optimizer", "best"),
    2: (
        "resume",
        "generation",
        "inference",
        "adapters",
        "resizing",
        "evaluation_alone",
        "sharing",
        "sequences",
        "adafactor",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_scenes(tmp_path: Path, world: int) -> None:
    script = str(HERE / "trainer_script.py")
    launch = run(
        tmp_path,
        "--num_gpus",
        str(world),
        "--no_local_rank",
        script,
        str(tmp_path / "results"),
        *SCENES[world],
    )
    ended = [line.split()[1] for line in launch.out.splitlines() if line.startswith("scene ")]
    assert ended == list(SCENES[world]), launch.err[-3000:]


def _example(folder: Path, *options: str, config: str | None = None) -> list[float]:
    """The example's training losses."""
    args = [
        str(ROOT / "examples/hf/train_clm.py"),
        "--output_dir",
        str(folder / "trained"),
        "--logging_steps",
        "1",
    ]
    args += ["--hidden_size", "64", "--num_hidden_layers", "2", "--context", "32", "--report_to", "none"]
    args += ["--per_device_train_batch_size", "2", "--warmup_steps", "2", "--learning_rate", "1e-3", *options]
    if config is not None:
        args += ["--deepspeed", str(ROOT / "examples/hf" / config)]
    launch = run(folder, "--num_gpus", "2", "--no_local_rank", *args)
    assert "validation loss" in launch.out, launch.err[-3000:]
    state = max(
        (folder / "trained").glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime
    )
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


@pytest.mark.exhaustive
@pytest.mark.parametrize("configs", [("ds_stage3.json",), ("ds_offload.json",)], ids=["stage 3", "offload"])
def test_the_example_trains_as_without_deepspeed(tmp_path: Path, configs: tuple[str, ...]) -> None:
    start = tmp_path / "start"
    make = (
        "import sys; from transformers import AutoModelForCausalLM as A, LlamaConfig as C; "
        "A.from_config(C(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, "
        "num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32))"
        ".save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", make, str(start)], check=True, capture_output=True)
    curves: dict[str, Any] = {}
    for config in (None, *configs):
        folder = tmp_path / str(config)
        folder.mkdir()
        options = ("--start", str(start), "--max_steps", "6", "--save_steps", "3")
        curves[str(config)] = _example(folder, *options, config=config)
    plain = curves["None"]
    assert len(plain) == 6
    for name, curve in curves.items():
        assert max(abs(a - b) for a, b in zip(curve, plain, strict=True)) < 1e-3, (name, curve, plain)
    if "ds_offload.json" not in configs:
        return
    checkpoint = tmp_path / "ds_offload.json" / "trained" / "checkpoint-3"
    resumed = _example(
        tmp_path / "ds_offload.json",
        "--max_steps",
        "6",
        "--save_steps",
        "3",
        "--start",
        str(start),
        "--resume_from_checkpoint",
        str(checkpoint),
        config="ds_offload.json",
    )
    assert resumed == curves["ds_offload.json"]


RESTARTED = """
import os, signal, torch, zlaunch
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed
from transformers import Trainer, TrainerCallback, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        row = torch.randint(0, 100, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}

class Die(TrainerCallback):
    def on_save(self, args, state, control, **options):
        if state.global_step == 4 and args.process_index == 0 and not os.path.exists("died"):
            open("died", "w").close()
            os.unlink("trained/checkpoint-4/trainer_state.json")
            os.kill(os.getpid(), signal.SIGKILL)

config = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2},
}
set_seed(1)
size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=100, num_key_value_heads=2, **size))
args = TrainingArguments(
    "trained", deepspeed=config, use_cpu=True, max_steps=6, save_steps=2, eval_strategy="steps", eval_steps=3,
    logging_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2, report_to="none",
    lr_scheduler_type="constant", disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Die()])
found = zlaunch.resume_dir("trained")
print("resumes from", found and os.path.basename(found), flush=True)
trainer.train(resume_from_checkpoint=found)
"""


@pytest.mark.exhaustive
def test_a_restart_resumes_and_evaluations_are_curves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTED)
    options = ("--num_gpus", "2", "--no_local_rank", "--max_restarts", "1", "--run_dir", "run")
    launch = run(tmp_path, *options, "train.py")
    assert "resumes from None" in launch.out and "resumes from checkpoint-2" in launch.out, launch.err[-3000:]
    assert "checkpoint-4: is incomplete (no trainer_state.json): using checkpoint-2 instead" in launch.out
    log = json.loads((tmp_path / "trained" / "checkpoint-6" / "trainer_state.json").read_text())[
        "log_history"
    ]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    progress = RunProgress().take_all(map(json.loads, lines))
    assert (progress.step, progress.steps) == (6, 6), "a constant schedule does not say the steps"
    evaluated = dict(progress.series["eval_loss"].shown())
    assert evaluated == {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    last = next(entry["loss"] for entry in log[::-1] if "loss" in entry)
    step, shown = progress.series["loss"].shown()[-1]
    assert step == 6 and shown == pytest.approx(last, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "zlaunch", "-q", "--num_gpus", "2", "--no_local_rank"),
        pytest.param(
            ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port={port}"),
            marks=pytest.mark.exhaustive,
        ),
        (
            *(
                "-m",
                "zlaunch.compat.deepspeed",
                "accelerate",
                "launch",
                "--use_deepspeed",
                "--zero_stage",
                "2",
            ),
            *(
                "--num_processes",
                "2",
                "--num_machines",
                "1",
                "--mixed_precision",
                "no",
                "--dynamo_backend",
                "no",
            ),
            *("--main_process_port", "{port}"),
        ),
    ],
    ids=["zlaunch", "torchrun", "accelerate launch"],
)
def test_accelerate(tmp_path: Path, command: tuple[str, ...]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with reserved_port() as port:
        result = subprocess.run(
            [
                sys.executable,
                *(word.format(port=port) for word in command),
                str(HERE / "accelerate_script.py"),
                str(tmp_path / "saved"),
            ],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert result.stdout.count("ends well") == 3, result.stderr[-3000:]
