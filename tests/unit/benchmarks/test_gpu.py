"""Check that the benchmark for GPUs writes down what fails or takes too long, and goes on with the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part, flops_of_a_token, goals, main, run
from tests.limits import wait_until


def test_parts_that_fail_are_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        Part("missing", ("benchmarks.nowhere",), 60, ()),
        Part(
            "slow",
            ("timeit", "-n1", "-r1", "print('begun', flush=True); import time; time.sleep(600)"),
            1,
            (),
        ),
        Part("good", ("json.tool", "--compact", "FILE"), 60, ()),
        Part("a device", ("json.tool",), 60),
    )
    (tmp_path / "in.json").write_text('{"step_s": 1.5}')
    parts = (
        *parts[:2],
        Part("good", ("json.tool", "--compact", str(tmp_path / "in.json")), 60, ()),
        parts[3],
    )
    monkeypatch.setattr(gpu, "GROUPS", {"all": parts})
    assert main(["--out", str(tmp_path / "out"), "--rehearse"]) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "No module named" in results["missing"]["said"] and results["missing"]["failed"] == "exit code 1"
    assert results["slow"]["failed"] == "more than 5 s" and "begun" in results["slow"]["said"]
    assert results["good"]["result"] == {"step_s": 1.5}
    assert results["a device"] == {"left out": "needs a GPU"}
    assert "No module named" in (tmp_path / "out" / "log.txt").read_text()


def test_no_part_goes_on_beyond_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GROUPS", {"all": (Part("late", ("json.tool",), 60, ()),)})
    assert main(["--out", str(tmp_path), "--minutes", "0.01"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["late"] == {"left out": "no time was left"}


def test_what_was_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"rehearsed": false, "late": {"result": {"step_s": 1}}}')
    monkeypatch.setattr(gpu, "GROUPS", {"all": (Part("late", ("json.tool",), 60, ()),)})
    assert main(["--out", str(tmp_path), "--minutes", "0.01"]) == 0
    assert json.loads(path.read_text())["late"] == {"result": {"step_s": 1}}
    for text, words in (('{"rehearsed": true}', "is of a rehearsal"), ("{", "is not JSON")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path)])
        assert words in capsys.readouterr().err


def test_what_follows_a_result_does_not_hide_it(tmp_path: Path) -> None:
    code = "print('{'); print('{\\n \"step_s\": 2}'); print('a library says goodbye')"
    found = run(Part("talks", ("timeit", "-n1", "-r1", code), 60), 60, tmp_path / "log", rehearse=False)
    assert found["result"] == {"step_s": 2}


@pytest.mark.exhaustive
def test_a_result_says_whether_kernels_fell_back(tmp_path: Path) -> None:
    """The warning is the one of cuda_ops/loader.py."""
    prints = "print('{\"step_s\": 2}')"
    warns = f"from zlaunch.cuda_ops import loader; loader._warn_once('no NVRTC'); {prints}"
    for code, kernels in ((prints, "no fallback"), (warns, "torch's operations instead: no NVRTC")):
        part = Part("talks", ("timeit", "-n1", "-r1", code), 60)
        found = run(part, 60, tmp_path / "log", rehearse=False)
        assert found["result"] == {"step_s": 2} and found["kernels"] == kernels


def test_a_part_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    """The file has every finished part, and nothing holds the GPU."""
    (tmp_path / "in.json").write_text('{"step_s": 1.5}')
    pid = tmp_path / "pid"
    sleeps = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"""
from benchmarks import gpu
gpu.GROUPS = {{"all": (
    gpu.Part("good", ("json.tool", "--compact", {str(tmp_path / "in.json")!r}), 60, ()),
    gpu.Part("long", ("timeit", "-n1", "-r1", {sleeps!r}), 600, ()),
)}}
gpu.main(["--rehearse"])
"""
    env = {**os.environ, "OUT": str(tmp_path / "kept"), "PYTHONPATH": str(gpu.ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: pid.exists() and pid.read_text() != "", "the part runs")
        process.kill()
    wait_until(lambda: not Path("/proc", pid.read_text()).exists(), "the part has ended")
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert results["good"]["result"] == {"step_s": 1.5} and "long" not in results


@pytest.mark.exhaustive
def test_a_part_of_the_rehearsal_is_real(tmp_path: Path) -> None:
    found = run(gpu.FIRST[0], 300, tmp_path / "log", rehearse=True)
    assert found["result"]["matmul_tflops"] > 0, found


def test_goals() -> None:
    results = {
        "device": {"result": {"matmul_tflops": 700.0}},
        "torch": {"result": {"tokens_per_s": 30000}},
        "stage 2": {"result": {"tokens_per_s": 29700, "parameters": 1_500_000_000, "step_s": 0.2}},
        "stage 3": {"failed": 1},
        "kernels": {"result": {"adamw": {"of_copy": 0.9}}},
        "waits": {"result": {"waits_of_a_step": {"cudaEventSynchronize": 1.0}}},
    }
    found = {row["what"]: (row["measured"], row["verdict"]) for row in goals(results)}
    flops = flops_of_a_token(48, 1600, 1024, 1_500_000_000)
    assert flops == 6 * 1.5e9 + 12 * 48 * 1600 * 1024
    assert found == {
        "adamw: of a copy": (0.9, "short"),
        "stage 2: of plain torch": (0.99, "pass"),
        "stage 2: MFU": (round(29700 * flops / 700e12, 3), "short"),
        "waits: of a step": (1.0, "short"),
    }
