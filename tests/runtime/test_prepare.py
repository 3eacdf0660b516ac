"""Test ``zlaunch.prepare``: plain PyTorch loops train as they do in one process, and metrics are gathered."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zlaunch
from tests.needs import needs_package
from tests.runtime.models import batches, loss_of, net, relative_error
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.prepare import PRESETS

STEPS, MICRO_BATCHES, TOLERANCE = 4, 2, 1e-9


def _loop(model: nn.Module, optimizer: Any, data: list[list[Tensor]]) -> None:
    """Train as a script for one GPU does, with accumulation of its own."""
    for micro_batches in data:
        for tokens in micro_batches:
            loss = loss_of(model, tokens) / len(micro_batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def _train_presets() -> dict[str, float]:
    join()
    plain = net().double()
    data = batches(STEPS, 8)
    _loop(plain, _optimizer(plain), [list(batch.chunk(MICRO_BATCHES)) for batch in data])
    wanted = plain.state_dict()
    errors = {}
    for name in PRESETS:
        model = net().double()
        optimizer = _optimizer(model)
        engine = zlaunch.prepare(model, optimizer, config=name)
        first = engine.data_parallel_rank * MICRO_BATCHES
        own = [list(batch.chunk(2 * MICRO_BATCHES))[first : first + MICRO_BATCHES] for batch in data]
        _loop(engine, optimizer, [[tokens.to(engine.device) for tokens in step] for step in own])
        assert engine.global_steps == STEPS
        assert engine.optimizer is optimizer
        state = engine.module.state_dict()
        errors[name] = max(relative_error(state[key].cpu(), value) for key, value in wanted.items())
        engine.destroy()
    return errors


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_a_plain_loop_trains_as_in_one_process() -> None:
    for errors in run_workers(_train_presets, 2):
        assert errors.keys() == PRESETS.keys()
        assert max(errors.values()) < TOLERANCE, errors


def _arguments() -> None:
    join()
    model = net()
    engine = zlaunch.prepare(model, _make, config="zero2", bf16=True, max_grad_norm=0.5, batch_size=3)
    config = engine.effective_config
    assert config.bf16.enabled
    assert config.gradient_clipping == 0.5
    assert engine.micro_batch_size == engine.train_micro_batch_size_per_gpu() == 3
    assert engine.zero_stage == engine.zero_optimization_stage() == 2
    assert engine.accumulation_steps == engine.gradient_accumulation_steps() == 1
    assert engine.grad_norm is engine.get_global_grad_norm() is None
    assert next(model.parameters()).dtype == torch.bfloat16
    engine.destroy()

    model = net()
    engine = zlaunch.prepare(model, _optimizer(model), config="zero1")
    data = TensorDataset(torch.zeros(12, 2))
    with pytest.raises(zlaunch.ParameterError, match="Pass batch_size here"):
        engine.dataloader(data)
    validation = engine.dataloader(DataLoader(data, batch_size=2), training=False)
    assert len(validation) == 6
    assert engine.global_batch_size == 1, "a loader for validation says nothing about training"
    loader = engine.dataloader(DataLoader(data, batch_size=4))
    assert len(loader) == 3
    assert engine.micro_batch_size == 4
    assert engine.global_batch_size == engine.train_batch_size() == 4
    assert len(engine.dataloader(data)) == 3
    with pytest.raises(AttributeError, match=r"nor its 'Net' has .* 'save_chekpoint'. Did you mean 'save_ch"):
        engine.save_chekpoint("ckpt")  # type: ignore[operator]
    assert not hasattr(engine, "absent")
    engine.destroy()

    engine = zlaunch.prepare(nn.Linear(4, 4), _make, bf16=True, loss_reduction="tokens")
    assert engine(torch.ones(2, 4)).dtype == torch.bfloat16, "inputs are cast"
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss, num_tokens=2)
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_arguments_are_used() -> None:
    run_workers(_arguments, 1)


def _warn_of_what_is_lost(folder: str) -> list[str]:
    join()
    printed = io.StringIO()
    with redirect_stdout(printed):
        model = net()
        optimizer = _optimizer(model)
        engine = zlaunch.prepare(model, optimizer, config="zero2")
        tokens = batches(1, 2)[0]
        data = TensorDataset(tokens)
        engine.dataloader(DataLoader(data, batch_size=2))
        engine.dataloader(DataLoader(data, batch_size=1))
        loss_of(engine, tokens).backward()
        engine.save_checkpoint(folder)
        optimizer.step()
        engine.save_checkpoint(folder)
        engine.destroy()
    return [line for line in printed.getvalue().splitlines() if "warning" in line]


def test_gradients_that_a_save_leaves_out_and_other_batch_sizes_are_warned_of(tmp_path: Path) -> None:
    for size, _same_data, lost in run_workers(_warn_of_what_is_lost, 1, str(tmp_path)):
        assert "batch_size is 1, but samples are counted by the config's" in size
        assert "does not contain the gradients of the last 1 micro-batch" in lost


def test_a_config_that_is_none_is_refused_by_name() -> None:
    model = net()
    wrong = {
        "zero4": r"'zero4' is neither a preset \(ddp, .*\) nor a file. Did you mean 'zero3'",
        "zero-3": r"Did you mean 'zero3'",
        "absent/ds.json": "no such file",
    }
    for config, message in wrong.items():
        with pytest.raises(zlaunch.ConfigError, match=message):
            zlaunch.prepare(model, _optimizer(model), config=config)
    with pytest.raises(zlaunch.ConfigError, match=r"bf16= completes a preset.* set bf16.enabled instead"):
        zlaunch.prepare(model, _optimizer(model), config={"train_batch_size": 1}, bf16=True)
    with pytest.raises(TypeError):
        zlaunch.prepare(model, _optimizer(model), "zero1")  # type: ignore[call-arg]  # by name alone


# -- types


SCRIPT = """
import torch
import zlaunch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
engine = zlaunch.prepare(model, optimizer, config="zero3", bf16=True)
zlaunch.seed(1)
x = torch.ones(2, 4, device=engine.device)
loss: torch.Tensor = engine(x).sum()
loss.backward()
optimizer.step()
engine.{method}("ckpt")
"""


@needs_package("mypy")
@pytest.mark.exhaustive
def test_a_type_checker_takes_a_right_script_and_finds_a_misspelled_method(tmp_path: Path) -> None:
    found = []
    for method in ("save_checkpoint", "save_chekpoint"):
        script = tmp_path / f"{method}.py"
        script.write_text(SCRIPT.format(method=method))
        options = ["--follow-imports=silent", f"--cache-dir={tmp_path}/cache", script.name]
        command = [sys.executable, "-m", "mypy", *options]
        found.append(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False))
    right, wrong = found
    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode == 1
    assert "not callable" in wrong.stdout
    assert wrong.stdout.count("error:") == 1


# -- seeds


def _draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), torch.rand(()).item()


def _seeded(**options: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    zlaunch.seed(5, **options)
    first = _draws()
    zlaunch.seed(5, **options)
    return first, _draws()


def _seed_all_ranks() -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    join()
    return [_seeded(), _seeded(per_rank=True)]


def test_a_seed_repeats_all_generators_on_all_ranks_alike_or_on_each_by_itself() -> None:
    one, other = run_workers(_seed_all_ranks, 2)
    for first, again in (*one, *other):
        assert first == again
    assert one[0] == other[0]
    assert all(a != b for a, b in zip(one[1][0], other[1][0], strict=True))
    assert one[1] == one[0], "rank 0 has the seed itself"
    wrong: list[tuple[Any, type[Exception]]] = [(1.5, TypeError), (True, TypeError), (-1, ValueError)]
    for value, error in wrong:
        with pytest.raises(error, match="seed is"):
            zlaunch.seed(value)


# -- metrics


SAMPLES = 7


def _peek_inside_of_a_pass(engine: Any, loader: Any) -> None:
    """Look at a first batch on one rank, in the middle of a pass of all."""
    for number, (own, _) in enumerate(loader):
        if number == 1:
            engine.gather_for_metrics(own, loader)
        elif number == 0 and engine.data_parallel_rank == 0:
            next(iter(loader))


def _gather(axes: dict[str, int]) -> dict[str, Any]:
    rank = join()
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "data_loader": {"pin_memory": False},  # a pretended GPU has no such memory
    }
    if axes:
        settings |= {"parallel": axes, "tensor_parallel": {"plan": plan}}
    engine = zlaunch.prepare(net(), _make, config=settings)
    numbers = torch.arange(SAMPLES)
    data = TensorDataset(numbers, torch.stack([numbers, -numbers], dim=1).double())
    found: dict[str, Any] = {"numbers": [], "pairs": [], "losses": []}
    loader = engine.dataloader(data, batch_size=2, training=False)
    rows = []
    for own, pairs in loader:
        rows.append(own)
        joined = engine.gather_for_metrics({"numbers": own, "pairs": (pairs, own > 2)}, loader)
        found["numbers"] += joined["numbers"].tolist()
        found["pairs"] += joined["pairs"][0][:, 1].tolist()
        assert joined["pairs"][1].tolist() == (joined["numbers"] > 2).tolist()
        loss = torch.tensor(float(engine.data_parallel_rank))
        found["losses"].append(engine.gather_for_metrics(loss).tolist())
    found["whole"] = engine.gather_for_metrics(torch.cat(rows), loader).tolist()
    ahead = list(loader)
    uneven = torch.full((engine.data_parallel_rank + 1, 3), float(engine.data_parallel_rank))
    found["uneven"] = engine.gather_for_metrics(uneven)[:, 0].tolist()
    found["messages"] = []
    wrong: list[Callable[[], Any]] = [
        lambda: engine.gather_for_metrics(ahead[0], loader),
        lambda: engine.gather_for_metrics([1.0]),
        lambda: engine.gather_for_metrics(torch.zeros(2, engine.data_parallel_rank + 1)),
        lambda: engine.gather_for_metrics(torch.zeros(5), loader),
        lambda: engine.gather_for_metrics(torch.tensor(1.0), loader),
        lambda: engine.gather_for_metrics(torch.zeros(2), None if engine.data_parallel_rank else loader),
        lambda: engine.gather_for_metrics([torch.zeros(2)] * (1 + engine.data_parallel_rank)),
        lambda: engine.gather_for_metrics(torch.zeros(1), loader.loader),  # type: ignore[arg-type]
        lambda: _peek_inside_of_a_pass(engine, loader),
    ]
    empty = engine.gather_for_metrics(torch.zeros(0, 3), None)
    assert (empty.shape, empty.dtype) == ((0, 3), torch.float32)
    assert engine.gather_for_metrics(None) is None
    for call in wrong:
        try:
            call()
        except (zlaunch.ParameterError, TypeError) as error:
            found["messages"].append(str(error))
    assert rank == engine.global_rank
    engine.destroy()
    return found


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("world", "axes"), [(2, {}), (3, {}), (4, {"tensor": 2})])
def test_metrics_have_each_sample_once_and_in_order(world: int, axes: dict[str, int]) -> None:
    places = world // axes.get("tensor", 1)
    for found in run_workers(_gather, world, axes):
        assert found["numbers"] == list(range(SAMPLES))
        assert found["pairs"] == [-float(number) for number in range(SAMPLES)]
        assert all(losses == list(map(float, range(places))) for losses in found["losses"])
        assert found["uneven"] == [float(place) for place in range(places) for _ in range(place + 1)]
        assert found["whole"] == list(range(SAMPLES))
        said = (
            "samples in all batches of the pass that has ended: pass one row for each sample",
            "expected dense tensors, got float",
            "has other shapes or dtypes",
            "5 rows of this rank",
            "gather it without the loader",
            "pass the loader on all ranks or on none",
            "other tuples, lists or dict keys",
            "expected what engine.dataloader has returned",
            "another pass was begun inside of this one",
        )
        for message, wanted in zip(found["messages"], said, strict=True):
            assert wanted in message
