"""Test `zlaunch estimate` as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs_package
from zlaunch.cli.main import main
from zlaunch.runtime.config import load
from zlaunch.runtime.memory.trainer_config import trainer_config
from zlaunch.runtime.optimizer_specs import ESTIMATED

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def wide(width):
    return Net()

def frozen():
    net = Net()
    net.blocks[0].requires_grad_(False)
    return net

def broken():
    raise RuntimeError("my own")
"""


BIG = ["--params", "1e12", "--hidden", "12288", "--layers", "96", "--vocab", "50257"]
FOR_TRAINER = ["--params", "7B", "--num_gpus", "8", "--gpu_mem", "24", "--for", "fits", "--trainer"]


def call(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zlaunch", "estimate", *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )


def test_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters are fp32; activations are in 16 bits, but the graph keeps copies of weights as well."""
    (tmp_path / "net_under_autocast.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = ["estimate", "net_under_autocast.py:Net", "--input", "4096,64", "--gpu_mem", "8"]
    rows = {}
    for dtype in ("fp32", "bf16", "bf16_autocast"):
        assert main([*target, "--dtype", dtype, "--json"]) == 0
        rows[dtype] = json.loads(capsys.readouterr().out)[0]["gpu"]
    assert rows["fp32"]["parameters"] == rows["bf16_autocast"]["parameters"] != rows["bf16"]["parameters"]
    low = rows["bf16"]["activations"]
    mixed = rows["bf16_autocast"]["activations"]
    high = rows["fp32"]["activations"]
    assert low < mixed < high
    assert main([*target, "--dtype", "fp16-autocast", "--for", "fits"]) == 0
    assert '"torch_autocast": {"enabled": true, "dtype": "float16"}' in capsys.readouterr().out
    assert main(["estimate", *BIG, "--dtype", "bf16_autocast"]) == 2
    assert "--dtype bf16_autocast needs a model: MODEL or --hf_config" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    target = ["model.py:Net", "--input", "32,64", "--gpus", "2", "--dtype", "fp32"]
    shown = call(tmp_path, *target, "--gpu_mem", "8")
    assert shown.returncode == 0, shown.stderr
    assert (
        "2 GPUs; fp32, AdamW, --input 32,64 a GPU; MiB of a rank" in shown.stdout
        and "a pass on fake tensors" in shown.stdout
    )
    rows = json.loads(call(tmp_path, *target, "--json").stdout)
    numel = 4 * (64 * 256 * 2 + 64 + 256)
    first = rows[0]["gpu"]
    assert (first["parameters"], first["gradients"], first["optimizer"]) == (4 * numel, 4 * numel, 8 * numel)
    kept = 4 * 32 * (64 + 256 + 256) * 4  # each block's input, and GELU's input and output
    assert kept <= first["activations"] <= 1.5 * kept
    assert rows[1]["activation_checkpointing"] and rows[1]["gpu"]["activations"] < first["activations"]
    fitting = call(tmp_path, *target, "--gpu_mem", "8", "--for", "FITS")
    assert '"stage": 0' in fitting.stdout and '"train_micro_batch_size_per_gpu": 32' in fitting.stdout
    assert "host memory was not checked" in fitting.stderr


@pytest.mark.exhaustive
def test_ranks_that_share_a_model(tmp_path: Path) -> None:
    axes = ["--gpus", "8", "--tensor", "2", "--pipeline", "4"]
    shown = call(tmp_path, *BIG, *axes)
    assert shown.returncode == 0, shown.stderr
    assert (
        "8 GPUs (pipeline 4, data 1, tensor 2); bf16, AdamW, 1 x 2,048 tokens for 8 GPUs together"
        in " ".join(shown.stdout.split())
    )
    assert "stage 2" not in shown.stdout and "It keeps 4 micro-batches at a time" in shown.stdout
    rows = json.loads(call(tmp_path, *BIG, *axes, "--json").stdout)
    layer, root = 12 * 12288 * 12288, int(1e12) - 96 * 12 * 12288 * 12288
    assert rows[0]["gpu"]["parameters"] == 2 * (root + 24 * layer) // 2
    fitting = call(tmp_path, *BIG, *axes, "--gpu_mem", "9000", "--for", "fits").stdout
    assert '"parallel": {"pipeline": 4, "tensor": 2}' in fitting
    assert '"gradient_accumulation_steps": 4' in fitting


@pytest.mark.exhaustive
def test_the_time_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "net.json").write_text(
        json.dumps({"collectives": [{"ranks": [0, 1], "bus_bytes_per_s": 1e9}]})
    )
    target = ["model.py:Net", "--input", "32,64", "--gpus", "2", "--simulate"]
    shown = call(tmp_path, *target, "--tflops", "100", "--measured", "net.json")
    assert shown.returncode == 0, shown.stderr
    assert "samples/s" in shown.stdout and "bound by" in shown.stdout
    assert "?: not known without --host_link, --host_bandwidth, --nvme_read, --nvme_write" in shown.stdout
    rows = json.loads(call(tmp_path, *target, "--tflops", "1e-6", "--link", "1e6", "--json").stdout)
    operations = 4 * 2 * 32 * 64 * 256 * 2 * 3 - 2 * 32 * 64 * 256  # the input needs no gradient
    step = rows[0]["step"]
    assert step["seconds"] == pytest.approx(operations / 1e6) and step["bound_by"] == "compute"
    assert step["samples_per_s"] == pytest.approx(64 / step["seconds"]) and step["missing"] == []
    assert rows[-1]["step"]["seconds"] is None and "--nvme_read" in rows[-1]["step"]["missing"]


@pytest.mark.exhaustive
def test_a_picture_of_the_memory(tmp_path: Path) -> None:
    numbers = ["--params", "1.5B", "--hidden", "1600", "--layers", "48", "--vocab", "50257", "--gpus", "4"]
    drawn = call(tmp_path, *numbers, "--gpu_mem", "24", "--plot", "memory.png")
    assert drawn.returncode == 0, drawn.stderr
    assert "drawn: memory.png" in drawn.stdout
    data = (tmp_path / "memory.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 10_000
    assert call(tmp_path, "--params", "1000", "--plot", "memory.svg", "--json").returncode == 0
    assert "activations are not known" in (tmp_path / "memory.svg").read_text()
    (tmp_path / "folder.png").mkdir()
    refused = call(tmp_path, *numbers, "--plot", "folder.png")
    assert refused.returncode == 2 and "--plot folder.png: Is a directory" in refused.stderr


def test_no_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["estimate", "--params", "1e9", "--plot", "memory.png"]) == 2
    assert "pip install 'zlaunch[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "pass MODEL, --hf_config or --params"),
        (["--params", "1e9", "--for", "fits"], "--for fits needs --gpu_mem"),
        (["--params", "1e9", "--trainer"], "--trainer needs --for fits, which prints a config"),
        ([*FOR_TRAINER, "--pipeline", "2"], "--pipeline 2 cannot be combined with --trainer"),
        ([*FOR_TRAINER, "--sequence", "2"], "--sequence 2 cannot be combined with --trainer"),
        (["model.py:Net", "--gpu_mem", "80", "--for", "fits"], "--for fits needs the activations"),
        ([*BIG, "--gpu_mem", "8", "--for", "fits"], "a model of 1T parameters does not fit on 1 GPU with"),
        (["model.py:Net", "--hidden", "8"], "--hidden goes with --params"),
        (["--params", "1e9", "--input", "8"], "--input goes with MODEL"),
        (["model.py:Net", "--seq", "8"], "--seq cannot be combined with MODEL"),
        (
            ["--hf_config", "./nowhere"],
            "./nowhere: no such file or folder, and no model of that name on the Hub",
        ),
        (["7B"], "'7B' is a number of parameters: use --params 7B"),
        (
            ["model.py:Net", "--input", "7,7"],
            "on fake tensors, with an input of 7,7 in bfloat16; for token ids",
        ),
        (
            ["model.py:Net", "--input", "7,7:int"],
            "if it is not the model's (int64, float32, bfloat16, float16)",
        ),
        (["model.py:Nett"], "model.py:Nett: no such name; did you mean Net?"),
        (["model.py:torch"], "model.py:torch: torch is a module, not a function"),
        (["model.py:wide"], "model.py:wide needs arguments (width): use a function without"),
        (["model.py:broken"], "RuntimeError: my own"),
        (["nowhere.py:Net"], "nowhere.py: no such file"),
        (["script.py:Net"], 'put its training code under `if __name__ == "__main__":`'),
        (["model.py:Net", "--gpus", "2", "--tensor", "2"], "Net has no plan for tensor parallelism"),
        (["--params", "1e9", "--gpus", "8", "--tensor", "3"], "--tensor 3: needs a multiple of 3 GPUs"),
        (["--params", "1e9", "--gpus", "2", "--expert", "2"], "pass MODEL or --hf_config"),
        (["--params", "1000", "--gpus", "2", "--pipeline", "2"], "pass --hidden and --layers"),
        ([*BIG, "--gpus", "97", "--pipeline", "97"], "cannot split 96 layers into 97 pipeline stages"),
        ([*BIG, "--gpus", "8", "--sequence", "8", "--seq", "1001"], "--seq 1001 cannot be divided by"),
        (
            [*BIG, "--gpus", "2", "--tensor", "2", "--simulate"],
            "does not model the communication of --tensor",
        ),
        (
            ["model.py:Net", "--input", "8,64", "--gpus", "2", "--sequence", "2"],
            "cannot be combined with --input",
        ),
        (["--params", "7x"], "'7x' is not a number of at least 1"),
        (["--params", "1e9", "--tflops", "100"], "--tflops goes with --simulate"),
        (["--params", "1e9", "--measured", "x.json"], "--measured goes with --simulate"),
        (["--params", "1e9", "--simulate", "--link", "0"], "0.0 is not in the range x>0"),
        (["--params", "1e9", "--simulate", "--measured", "x.json"], "--measured x.json: No such file"),
        (["--params", "1e9", "--simulate", "--measured", "model.py"], "--measured model.py is not JSON"),
        (["--params", "1e9", "--gpu_mem", "8", "--for", "fits", "--simulate"], "remove --simulate"),
        (["model.py:Net", "--simulate"], "--simulate needs the operations of MODEL: give --input"),
        (["--params", "1e9", "--plot", "memory.xyz"], "unknown suffix '.xyz'; use one of "),
        (["--params", "1e9", "--plot", "nowhere/memory.png"], "--plot nowhere/memory.png: no such folder"),
    ],
)
def test_mistakes(
    args: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("import sys; assert len(sys.argv) == 1; sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["estimate", *args]) == 2
    said = capsys.readouterr().err
    assert text in said and "Traceback" not in said


def test_the_shape_is_guessed_from_the_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["estimate", "--params", "7B", "--gpu_mem", "80", "--num-gpus", "8"]
    assert main([*given, "--json"]) == 0
    shown = capsys.readouterr()
    rows = [row for row in json.loads(shown.out) if row["offload_optimizer"] == "none"]
    totals = {row["stage"]: row["gpu"]["total"] for row in rows if not row["activation_checkpointing"]}
    assert totals[0] > totals[1] > totals[2] > totals[3] and {row["fits"] for row in rows} == {True, False}
    guess = (
        "shape guessed from --params: 32 layers of hidden size 4,096 (--layers, --hidden), vocabulary 32,000"
    )
    assert guess in shown.err
    assert main([*given, "--hidden", "4096", "--layers", "32", "--vocab", "32000", "--json"]) == 0
    same = capsys.readouterr()
    assert (same.out, same.err) == (shown.out, "")
    assert main([*given, "--for", "fits"]) == 0
    fitting = capsys.readouterr()
    assert '"stage": 1' in fitting.out and guess in fitting.err


@pytest.mark.parametrize(
    ("hidden", "vocab", "said"),
    [
        ("1600", "50257", ["vocabulary 50,257 is not a multiple of 64: pad it to 50,304"]),
        ("1000", "50304", ["hidden size 1,000 is not a multiple of 64: 1,024 makes"]),
        ("1024", "50304", []),
    ],
)
def test_advice_on_shapes(
    hidden: str, vocab: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--params", "1.5B", "--hidden", hidden, "--layers", "24", "--vocab", vocab]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "multiple of 64" in line]
    assert len(lines) == len(said) and all(
        line.startswith(text) for line, text in zip(lines, said, strict=True)
    )


class _Hub(BaseHTTPRequestHandler):
    """Answers for one model as the Hugging Face Hub does."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 101}
        config |= {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
        answers = {
            "/api/models/org/tiny": {"id": "org/tiny", "sha": "1" * 40, "siblings": []},
            "/org/tiny/resolve/main/config.json": config,
            f"/org/tiny/resolve/{'1' * 40}/config.json": config,
        }
        found = answers.get(self.path.partition("?")[0])
        body = json.dumps({"error": "Repository not found"} if found is None else found).encode()
        self.send_response(404 if found is None else 200)
        if found is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.exhaustive
def test_a_name_on_the_hub(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, because the Hub's client reads its address when it is imported."""
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "http_proxy",
        "HTTP_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    found = call(tmp_path, "--hf_config", "org/tiny", "--seq", "64")
    assert found.returncode == 0, found.stderr
    numel = 101 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert f"org/tiny: {numel:,} parameters" in found.stdout
    assert "vocabulary 101 is not a multiple of 64: pad it to 128" in found.stdout
    other = call(tmp_path, "--hf_config", "org/none")
    assert (
        other.returncode == 2
        and f"org/none: no such file or folder, and no such model at {hub}" in other.stderr
    )


@pytest.mark.parametrize("reached", [False, True])
def test_a_name_that_the_hub_does_not_have(
    reached: bool, hub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    endpoint = hub if reached else "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert main(["estimate", "--hf_config", "org/none"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    if reached:
        assert f"org/none: no such file or folder, and no such model at {hub}" in said
    else:
        assert "org/none: no such file or folder, and http://127.0.0.1:9 does not answer (" in said
        assert "Download the model's config.json and pass its path, or use --params" in said


def test_steps_in_the_backward_pass_need_less_at_stages_2_and_3(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--params", "1.5B", "--hidden", "1600", "--layers", "48", "--vocab", "50257"]

    def rows(*more: str) -> dict[tuple[int, str], int]:
        assert main(["estimate", *model, "--gpus", "2", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert all(row["step_in_backward"] <= (row["stage"] >= 2 and bool(more)) for row in found)
        return {(row["stage"], row["offload_optimizer"]): row["gpu"]["gradients"] for row in found}

    before, after = rows(), rows("--step_in_backward")
    less = {key for key in before if after[key] < before[key] / 4}
    assert less == {(stage, "none") for stage in (2, 3)}
    assert all(after[key] == before[key] for key in before.keys() - less)


def test_narrow_state_and_masters_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--params", "124M", "--hidden", "768", "--layers", "12", "--vocab", "50257", "--gpus", "2"]

    def gpu(*more: str) -> tuple[int, int, int]:
        assert main(["estimate", *model, "--json", *more]) == 0
        found = [row for row in json.loads(capsys.readouterr().out) if row["stage"] == 0]
        amounts = found[0]["gpu"]
        return amounts["parameters"], amounts["gradients"], amounts["optimizer"]

    numel = gpu()[0] // 2
    assert gpu() == (2 * numel, 4 * numel, 12 * numel)
    assert gpu("--state_dtype", "bf16") == (2 * numel, 4 * numel, 8 * numel)
    narrow = gpu("--state_dtype", "int8", "--master_weights", "stochastic")
    assert narrow == (2 * numel, 2 * numel, round(numel * (2 + 8 / 256)))
    assert main(["estimate", *model, "--json", "--state_dtype", "int8"]) == 0
    assert not any(row["offload_optimizer"] == "nvme" for row in json.loads(capsys.readouterr().out))
    assert main(["estimate", *model, "--master_weights", "stochastic", "--dtype", "fp16"]) == 2
    assert "--master_weights stochastic needs --dtype bf16" in capsys.readouterr().err
    fits = ["--for", "fits", "--gpu_mem", "16", "--state_dtype", "int8", "--master_weights", "stochastic"]
    assert main(["estimate", *model, *fits]) == 0
    said = capsys.readouterr().out
    assert '"state_dtype": "int8"' in said and '"master_weights": "stochastic"' in said


def test_other_optimizers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--params", "124M", "--hidden", "768", "--layers", "12", "--vocab", "50257"]

    def of_optimizer(name: str) -> int:
        assert main(["estimate", *model, "--json", "--optimizer", name]) == 0
        first: dict[str, Any] = json.loads(capsys.readouterr().out)[0]
        return int(first["gpu"]["optimizer"])

    numel = of_optimizer("AdamW") // 12
    assert [of_optimizer(name) // numel for name in ("lion", "Adagrad", "SGD", "Lamb")] == [8, 8, 8, 12]
    for narrow in (["--state_dtype", "int8"], ["--master_weights", "stochastic"]):
        assert main(["estimate", *model, "--optimizer", "Muon", *narrow]) == 2
        assert "works with AdamW, Lion and SGD, not with Muon" in capsys.readouterr().err
    fits = ["--for", "fits", "--gpu_mem", "24", "--optimizer", "Lion"]
    assert main(["estimate", *model, *fits]) == 0
    assert '"type": "Lion"' in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ESTIMATED)
def test_a_config_for_the_trainer(optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--params", "7B", "--num_gpus", "8", "--gpu_mem", "24", "--optimizer", optimizer]
    assert main(["estimate", *given, "--micro_batch", "2", "--seq", "512", "--for", "fits", "--trainer"]) == 0
    said = capsys.readouterr()
    assert "--deepspeed FILE --per_device_train_batch_size 2 --bf16 true" in said.err
    config = json.loads(said.out)
    assert config["train_micro_batch_size_per_gpu"] == "auto" == config["optimizer"]["params"]["lr"]
    (tmp_path / "ds.json").write_text(said.out)
    assert load(tmp_path / "ds.json").config.optimizer is not None, "zlaunch takes all arguments"


def test_a_config_for_the_trainer_keeps_axes_and_writes_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *FOR_TRAINER, "--tensor", "2", "--gpu_mem", "32"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["tensor_parallel"] == {"autotp_size": 2} and "parallel" not in config
    zero = config["zero_optimization"]
    assert zero["stage"] < 3 and zero["stage3_gather_16bit_weights_on_model_save"]
    assert main(["estimate", "--params", "70B", *FOR_TRAINER[2:], "--gpu_mem", "48"]) == 0
    zero = json.loads(capsys.readouterr().out)["zero_optimization"]
    assert zero["stage"] == 3 and zero["stage3_gather_16bit_weights_on_model_save"]


def test_a_config_for_the_trainer_keeps_experts() -> None:
    text = (
        '{"train_micro_batch_size_per_gpu": 1, "parallel": {"expert": 2, "tensor": 2},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 1}}'
    )
    config = json.loads(trainer_config(text, 4)[0])
    assert config["parallel"] == {"expert": 2} and config["tensor_parallel"] == {"autotp_size": 2}
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    experts = json.loads(trainer_config(text.replace(', "tensor": 2', ""), 4)[0])
    assert experts["parallel"] == {"expert": 2} and "tensor_parallel" not in experts
    assert experts["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]


def test_what_does_not_fit_is_told_what_would_make_it_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--params", "7B", "--hidden", "4096", "--layers", "32", "--vocab", "32000"]
    tight = ["--gpu_mem", "3", "--host_mem", "2", "--for", "fits"]
    assert main(["estimate", *model, *tight]) == 2
    said = capsys.readouterr().err
    assert "--state_dtype int8, --master_weights stochastic, --step_in_backward make it smaller" in said
    assert "NVMe was not tried" not in said
    assert main(["estimate", *model, *tight, "--state_dtype", "int8"]) == 2
    said = capsys.readouterr().err
    assert "NVMe was not tried" in said and "--state_dtype int8," not in said


def test_large_logits_are_named_and_left_out_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["estimate", "--params", "1.2B", "--hidden", "2048", "--layers", "16", "--vocab", "128256"]
    assert main([*model, "--seq", "8192"]) == 0
    assert "11.7 GiB of the activations are logits: --tiled_loss" in capsys.readouterr().out
    assert main([*model, "--seq", "8192", "--tiled_loss"]) == 0
    assert "logits" not in capsys.readouterr().out
    assert main([*model[:-1], "8000", "--seq", "2048"]) == 0
    assert "logits" not in capsys.readouterr().out, "they are a small part"


@needs_package("transformers")
def test_a_tiled_loss_is_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 65536}
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape, **heads}
    (tmp_path / "config.json").write_text(json.dumps(described))
    amounts = []
    for more in ([], ["--tiled_loss"]):
        assert main(["estimate", "--hf_config", str(tmp_path), "--seq", "32768", "--json", *more]) == 0
        amounts.append(json.loads(capsys.readouterr().out)[0]["gpu"]["activations"])
    logits = 32768 * 32000 * 2  # in the compute dtype alone; there are more copies
    assert amounts[0] - amounts[1] > logits * 0.9


@needs_package("transformers")
@pytest.mark.parametrize(
    ("kind", "text"),
    [("gemma2", "changes its logits before the loss"), ("bert", "needs a Hugging Face model with the loss")],
)
def test_a_model_that_takes_no_tiled_loss_is_told_so_and_not_advised_one(
    kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"gemma2": "Gemma2ForCausalLM", "bert": "BertForMaskedLM"}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 65536}
    described = {"model_type": kind, "architectures": [names[kind]], "vocab_size": 64000, **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(described))
    place = ["estimate", "--hf_config", str(tmp_path), "--seq", "16384"]
    assert main(place) == 0
    assert "--tiled_loss" not in capsys.readouterr().out
    assert main([*place, "--tiled_loss"]) == 2
    said = capsys.readouterr().err
    assert text in said and "fake tensors" not in said


def test_a_tiled_loss_needs_activations_and_no_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", "model.py:frozen", "--tiled_loss"]) == 2
    assert "--tiled_loss changes the activations, which are not known" in capsys.readouterr().err
    whole = ["estimate", "--params", "7B", "--num_gpus", "2", "--pipeline", "2", "--tiled_loss"]
    assert main(whole) == 2
    assert "--tiled_loss cannot be combined with --pipeline" in capsys.readouterr().err


def test_what_does_not_fit_for_its_logits_is_told_of_a_tiled_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--params", "7B", "--hidden", "4096", "--layers", "32", "--vocab", "256000", "--seq", "65536"]
    assert main(["estimate", *model, "--gpu_mem", "40", "--host_mem", "500", "--for", "fits"]) == 2
    assert "--tiled_loss make it smaller" in capsys.readouterr().err


def test_a_config_that_fits_says_that_the_loss_is_tiled(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["estimate", "--params", "1.2B", "--hidden", "2048", "--layers", "16", "--vocab", "128256"]
    place = ["--seq", "8192", "--gpu_mem", "16", "--host_mem", "64", "--for", "fits", "--tiled_loss"]
    assert main([*model, *place]) == 0
    text = capsys.readouterr().out
    assert '"tiled_loss": true' in text and "as requested: no logits of whole sequences" in text


def test_activations_of_a_model_with_frozen_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    target = ["--input", "32,64", "--dtype", "fp32", "--gpu_mem", "8"]
    assert main(["estimate", "model.py:frozen", *target]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "--input 32,64" in shown and "frozen" in shown


def test_a_config_for_the_trainer_comes_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *FOR_TRAINER]) == 0
    said = capsys.readouterr()
    plain = [word for word in FOR_TRAINER if word != "--trainer"]
    assert main(["estimate", *plain]) == 0
    config = capsys.readouterr().out
    need, reason = (re.findall(pattern, config)[0] for pattern in (r"// estimated: (.*)", r"zero.*// (.*)"))
    assert f": {need}; {reason}\n" in said.err and "GiB of GPU memory per rank" in need


def test_a_model_that_does_not_fit_is_told_the_least_memory(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["estimate", "--params", "70B", "--gpu_mem", "4", "--host_mem", "2000"]
    assert main([*tight, "--for", "fits", "--trainer"]) == 2
    said = capsys.readouterr()
    assert not said.out and "The least GPU memory is with stage 3, optimizer and parameters on" in said.err
    found = re.search(r"activation checkpointing: ([0-9.]+) GiB of GPU memory per rank", said.err)
    assert found is not None
    assert main([*tight, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(min(row["gpu"]["total"] for row in rows) / 2**30, abs=0.05)
