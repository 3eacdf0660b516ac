"""Test TF32's flags, each in a process of its own, and what is said at the start about the precision."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zlaunch.runtime import precision
from zlaunch.runtime.config import load
from zlaunch.runtime.observe.limits import find_overflow_hint

OLD = "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {}"
BEFORE = {
    "": True,
    OLD.format(True): True,
    OLD.format(False): True,
    'torch.set_float32_matmul_precision("high")': True,
    'torch.set_float32_matmul_precision("highest")': True,
    # what Hugging Face's TrainingArguments set; torch then reads no single old flag of all products
    'torch.backends.fp32_precision = "tf32"': False,
    'torch.backends.fp32_precision = "ieee"': False,
}
"""Maps what a script may have set before to whether torch.get_float32_matmul_precision has to work after."""
FORKS = """
import os, sys, warnings
warnings.simplefilter("error")
import torch
from zlaunch.runtime.precision import set_tf32

def check(enabled):
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None:
        found = {torch._C._get_fp32_precision_getter("cuda", each) for each in ("matmul", "conv", "rnn")}
        assert found == {"tf32" if enabled else "ieee"}
    warnings.simplefilter("ignore")  # of reading the old flags, which has to be possible
    assert torch.backends.cuda.matmul.allow_tf32 is enabled
    assert torch.backends.cudnn.allow_tf32 is enabled

def child(before, enabled, readable):
    exec(before)
    set_tf32(enabled)
    check(enabled)
    if readable:
        assert torch.get_float32_matmul_precision() == ("high" if enabled else "highest")

for before, readable in CASES.items():
    if "fp32_precision" in before and not hasattr(torch.backends, "fp32_precision"):
        continue
    for enabled in (True, False):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(before, enabled, readable)
                code = 0
            finally:
                sys.stderr.write(f"{before!r}, {enabled}: {code}\\n")
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
print("good")
"""


@pytest.mark.exhaustive
def test_all_flags_of_tf32_agree_whatever_was_set_before() -> None:
    script = f"CASES = {BEFORE!r}\n{FORKS}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.split() == ["good"], run.stderr


def lines(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(precision, "say", said.append)
    comm: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    precision.settle_precision(load(config).config, comm)
    return said


def test_what_runs_in_the_place_of_apex_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    amp: dict[str, Any] = {"enabled": True}
    o1 = (
        "amp: zlaunch does not use apex; O1 becomes torch.autocast to float16 (torch_autocast) with a {} "
        "loss scale"
    )
    cases = {
        o1.format("dynamic"): amp,
        o1.format("fixed"): {**amp, "loss_scale": 8},
        "amp: zlaunch does not use apex; O0 becomes plain fp32 without loss scaling": {
            **amp,
            "opt_level": "O0",
        },
    }
    for line, section in cases.items():
        assert lines({"amp": section}, monkeypatch) == [line]
        assert lines({"amp": section}, monkeypatch, rank=1) == []
    assert lines({"torch_autocast": amp}, monkeypatch) == []


def test_tf32_without_a_gpu_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "set_tf32", lambda enabled: pytest.fail("the flags were set"))
    for value in (True, False):
        (line,) = lines({"tf32": value}, monkeypatch)
        assert line == "tf32 has no effect: it needs a GPU of compute capability 8.0 or higher"
    assert lines({"tf32": None}, monkeypatch) == lines({}, monkeypatch) == []


def test_tf32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(precision, "set_tf32", seen.append)
    comm: Any = SimpleNamespace(rank=0, device=torch.device("cuda", 0))
    for capability in ((8, 0), (9, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for value in (True, False, None):
            precision.settle_precision(load({"tf32": value}).config, comm)
    assert seen == [True, False, True, False]


def test_a_model_of_bf16_under_autocast_to_fp16_gets_a_hint() -> None:
    model = nn.Linear(2, 2).bfloat16()
    fp16: dict[str, Any] = {"enabled": True, "dtype": "float16"}
    hint = find_overflow_hint(model, load({"torch_autocast": fp16}).config)
    assert hint.endswith('"torch_autocast": {"enabled": true, "dtype": "bfloat16"}')
    assert '"amp": {"enabled": false}' in find_overflow_hint(model, load({"amp": {"enabled": True}}).config)
    assert not find_overflow_hint(model, load({"torch_autocast": {"enabled": True}}).config)
    assert not find_overflow_hint(nn.Linear(2, 2), load({"torch_autocast": fp16}).config)
