"""Test what the runtime reports to the launcher of an engine's steps."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import run_workers
from zlaunch.runtime.observe.reporter import StepReporter, _finish

PARTS = ("forward_ms", "backward_ms", "step_ms", "communication_ms", "disk_ms", "script_ms")


class Tokens(nn.Module):
    """Takes token ids, as a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.embedding(input_ids)).float().square().mean() * scale


def _reports(
    folder: str, steps: int, extra: dict[str, Any], by_name: bool
) -> tuple[list[dict[str, Any]], str]:
    """Train; return the events of this rank, and what was printed where there is no launcher."""
    zlaunch.init_distributed()
    rank = torch.distributed.get_rank()
    path = Path(folder, f"events_{rank}")
    if extra.pop("launcher", True):
        os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 2,
        **extra,
    }
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        engine, *_ = zlaunch.initialize(model=Tokens(), config=config)
        ids = torch.arange(12).view(4, 3) % 10
        for _ in range(steps):
            loss = engine(input_ids=ids) if by_name else engine(ids, 1.0)
            with torch.no_grad():
                engine(ids)  # a forward pass for evaluation trains on nothing
            engine.backward(loss)
            engine.step()
    os.environ.pop("ZLAUNCH_EVENT_FD", None)
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return events, printed.getvalue()


@pytest.mark.parametrize("by_name", [False, True])
def test_reports_of_two_ranks(by_name: bool, tmp_path: Path) -> None:
    extra = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}}
    (first, _), (second, _) = run_workers(_reports, 2, str(tmp_path), 6, extra, by_name)
    (about,) = [event for event in first if event["type"] == "environment"]
    assert about["torch"] == str(torch.__version__) and about["device"] == "CPU"
    reports = [event for event in first if event["type"] == "metrics"]
    printed = [event["values"] for event in reports if event["printed"]]
    assert [values["step"] for values in printed] == [2, 4, 6]
    assert reports[0]["values"]["step"] == 1 and not reports[0]["printed"]
    for values in printed:
        assert values["steps"] == 50 and values["grad_norm"] > 0 and "loss_scale" not in values
        assert values["tokens_per_s"] == pytest.approx(3 * values["samples_per_s"])
        assert values["memory_gb"] == values["host_gb"] > 0.01
        assert sum(values[part] for part in PARTS) == pytest.approx(values["all_ms"])
        assert all(values[part] >= 0 for part in PARTS) and values["communication_ms"] > 0
        assert values["disk_ms"] == 0.0
    assert printed[0]["loss"] > printed[1]["loss"] > printed[2]["loss"]
    assert "forward_ms" not in reports[0]["values"]  # the first step is like no other
    other = next(event for event in second if event["type"] == "metrics")
    assert other["values"]["step"] == 1 and not other["printed"] and other["rank"] == 1


def test_without_a_launcher_every_printed_step_is_a_line(tmp_path: Path) -> None:
    ((events, printed), (_, other)) = run_workers(_reports, 2, str(tmp_path), 5, {"launcher": False}, True)
    lines = printed.splitlines()
    assert not events and not other and [line.split()[:2] for line in lines] == [["step", "2"], ["step", "4"]]
    assert "_ms" not in printed and " loss " in lines[0] and " tokens_per_s " in lines[0]


def test_an_overflow_is_counted(tmp_path: Path) -> None:
    extra = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    ((events, _),) = run_workers(_reports, 1, str(tmp_path), 4, extra, True)
    values = [event["values"] for event in events if event["type"] == "metrics" and event["printed"]]
    assert [each["skipped_steps"] for each in values] == [2.0, 4.0]
    assert values[0]["loss_scale"] > values[1]["loss_scale"] >= 1.0


def _own_tokens(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "events")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    for _ in range(2):
        zlaunch.report(step=1, tokens=1000, val_loss=2.0, nothing=None)
    engine, *_ = zlaunch.initialize(
        model=Tokens(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "steps_per_print": 1,
        },
    )
    engine.backward(engine(torch.zeros(4, 3, dtype=torch.long)))
    engine.step()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_script_that_counts_tokens_is_believed(tmp_path: Path) -> None:
    (events,) = run_workers(_own_tokens, 1, str(tmp_path))
    first, second, last = [event["values"] for event in events if event["type"] == "metrics"]
    assert first == {"step": 1, "tokens": 1000, "val_loss": 2.0}
    assert second["tokens_per_s"] > 0 and "tokens_per_s" not in last and last["step"] == 1


def _loaded_at_the_end(folder: str) -> None:
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(Path(folder, "events"), os.O_WRONLY | os.O_CREAT))
    engine, *_ = zlaunch.initialize(
        model=Tokens(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        },
    )
    for step in range(3):
        engine.backward(engine(torch.zeros(4, 3, dtype=torch.long)))
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder + "/checkpoint")
    engine.load_checkpoint(folder + "/checkpoint")
    for reporter in [each for each in gc.get_objects() if isinstance(each, StepReporter)]:
        _finish(weakref.ref(reporter))


def test_the_last_step_is_reported_at_the_end(tmp_path: Path) -> None:
    run_workers(_loaded_at_the_end, 1, str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    values = [event["values"] for event in events if event["type"] == "metrics"]
    assert (values[0]["step"], values[-1]["step"]) == (1, 3)
    assert all(each["samples_per_s"] > 0 for each in values)


def _speed_after_loading(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "events")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 1,
    }
    engine, *_ = zlaunch.initialize(model=Tokens(), config=config)

    def step() -> None:
        engine.backward(engine(torch.zeros(4, 3, dtype=torch.long)))
        engine.step()

    step()
    engine.save_checkpoint(folder + "/checkpoint")
    for _ in range(4):
        step()
    engine.load_checkpoint(folder + "/checkpoint")
    for _ in range(3):
        step()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_speed_after_a_loaded_checkpoint_is_no_other(tmp_path: Path) -> None:
    (events,) = run_workers(_speed_after_loading, 1, str(tmp_path))
    values = [event["values"] for event in events if event["type"] == "metrics"]
    assert [each["engine_step"] for each in values] == [1, 2, 3, 4, 5, 3, 4], (
        "the first one after it is left out"
    )
    assert all(each["samples_per_s"] > 0 for each in values)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(x.float()).mean()
        return loss


def _own_counts(folder: str, kind: str) -> list[dict[str, Any]]:
    path = Path(folder, "events")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 1,
    }
    engine, *_ = zlaunch.initialize(model=Counted(), config=config)
    for micro in range(8):
        engine.backward(engine(torch.zeros(2, 3, dtype=torch.uint8)))
        if kind == "micro":
            zlaunch.report(step=10 * micro + 10, loss=torch.tensor(7.0))  # type: ignore[arg-type]  # as scripts do
        elif micro % 4 == 3:
            zlaunch.report(step=engine.global_steps, odd=object())  # type: ignore[arg-type]  # a mistake
        engine.step()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["micro", "steps"])
def test_a_scripts_own_count_and_loss_are_shown(kind: str, tmp_path: Path) -> None:
    (events,) = run_workers(_own_counts, 1, str(tmp_path), kind)
    values = [event["values"] for event in events if event["type"] == "metrics"]
    ours = [each for each in values if "engine_step" in each]
    assert [each["engine_step"] for each in ours] == [1, 2]
    assert all("tokens_per_s" not in each for each in ours), "pictures are no tokens"
    if kind == "micro":
        assert not any("step" in each or "loss" in each for each in ours)
        assert [each["loss"] for each in values if "loss" in each] == [7.0] * 8
    else:
        assert [each["step"] for each in ours] == [1, 2] and all("loss" in each for each in ours)


def _no_number() -> dict[str, float | torch.Tensor]:
    return {"train_loss": torch.ones(2)}


def _that_cannot_report(folder: str) -> str:
    path = Path(folder, "events")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    model = Counted()
    engine, *_ = zlaunch.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "steps_per_print": 1,
        },
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)))
            engine.step_metrics = _no_number  # type: ignore[method-assign]
            engine.step()
    assert engine.global_steps == 3
    return printed.getvalue()


def test_a_report_that_fails_ends_no_training(tmp_path: Path) -> None:
    (printed,) = run_workers(_that_cannot_report, 1, str(tmp_path))
    assert printed.count("this rank no longer reports steps: ") == 1 and "training continues" in printed


class Lengths(nn.Module):
    """Takes nested tensors: rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.stack([(row * self.weight).sum() for row in rows.unbind()]).mean()
        return total


def _odd(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "events")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 1,
    }
    engine, *_ = zlaunch.initialize(model=Lengths(), config=config)
    nested: Any = torch.nested.nested_tensor  # type: ignore[attr-defined, unused-ignore]
    for _ in range(2):
        engine.backward(engine(nested([torch.ones(2), torch.ones(3)])))
        zlaunch.report(step="one", tokens="many", loss=10**400, odd=object(), scale=torch.tensor(2.0))  # type: ignore[arg-type]
        engine.step()
    os.environ.pop("ZLAUNCH_EVENT_FD")
    zlaunch.report(step="one", loss=torch.tensor(2.0))  # type: ignore[arg-type]
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_odd_inputs_and_odd_reports_end_nothing(tmp_path: Path) -> None:
    (events,) = run_workers(_odd, 1, str(tmp_path))
    values = [event["values"] for event in events if event["type"] == "metrics"]
    ours, own = values[1::2], values[::2]
    assert [each["engine_step"] for each in ours] == [1, 2] and [each["rows"] for each in ours] == [2, 2]
    assert [each["scale"] for each in own] == [2.0, 2.0] and own[0]["step"] == "one"
