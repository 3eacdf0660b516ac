"""Test the 8-bit optimizers of bitsandbytes: their state is saved as fp32, and read into the same codes."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.needs import needs_package
from tests.runtime.models import with_forward
from tests.runtime.workers import run_workers

pytestmark = needs_package("bitsandbytes")
WIDTH = 64
SAVED_AT = 3
STEPS = 6


OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW8bit": {}, "Lion8bit": {}, "SGD8bit": {"momentum": 0.9}}
"""Maps those that are trained and resumed to what they need besides."""


def _optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    kind: Any = getattr(bitsandbytes.optim, name)
    made: torch.optim.Optimizer = kind(parameters, lr=1e-3, min_8bit_size=256, **OPTIMIZERS.get(name, {}))
    return made


def _train(name: str, zero: dict[str, Any], folder: str, resumes: bool) -> tuple[list[float], set[str]]:
    """Return the losses of the steps behind the checkpoint, and the dtypes of the matrices' state."""
    zlaunch.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = _optimizer(name, model.parameters())
    config = {
        "train_batch_size": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    engine, *_ = zlaunch.initialize(model=model, optimizer=optimizer, config=config)
    if resumes:
        engine.load_checkpoint(folder)
    losses = []
    while engine.global_steps < STEPS:
        if engine.global_steps == SAVED_AT and not resumes:
            engine.save_checkpoint(folder)
        samples = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(engine.global_steps))
        own = samples.chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        loss = (engine(own) - own).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.step_metrics()["train_loss"]))
    own_state = engine.handles._step.optimizer.state  # type: ignore[union-attr]
    dtypes = {
        str(state["state1"].dtype) for state in own_state.values() if state["state1"].numel() > WIDTH * 4
    }
    engine.destroy()
    return losses[-(STEPS - SAVED_AT) :], dtypes


CPU = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **CPU}], ids=str)
def test_a_resumed_run_repeats_the_steps(name: str, zero: dict[str, Any], tmp_path: Path) -> None:
    losses, dtypes = run_workers(_train, 2, name, zero, str(tmp_path), False)[0]
    again, same = run_workers(_train, 2, name, zero, str(tmp_path), True)[0]
    assert again == pytest.approx(losses, rel=1e-6)
    assert dtypes == same == {"torch.uint8"}


def test_another_layout_has_other_blocks(tmp_path: Path) -> None:
    losses, _ = run_workers(_train, 2, "AdamW8bit", {"stage": 3}, str(tmp_path), False)[0]
    for ranks, stage in ((1, 3), (2, 1), (4, 3)):
        again, dtypes = run_workers(_train, ranks, "AdamW8bit", {"stage": stage}, str(tmp_path), True)[0]
        assert again == pytest.approx(losses, rel=1e-3)
        assert dtypes == {"torch.uint8"}


def _tries(name: str, unused: bool, folder: str) -> tuple[str, str]:
    """Return the error of a step in which a layer is unused, or of a save after a step in which none is; and
    what was printed.
    """
    zlaunch.init_distributed()
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = with_forward(layers, lambda x: sum(each(x) for each in layers[: 2 if x[0, 0] else 3]))
    optimizer = _optimizer(name, model.parameters())
    zero = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            engine, *_ = zlaunch.initialize(
                model=model, optimizer=optimizer, config={"train_batch_size": 2, **zero}
            )
            for first in (0.0, float(unused)):
                engine.backward(engine(torch.full((1, WIDTH), first)).square().mean())
                engine.step()
            engine.save_checkpoint(folder)
        except zlaunch.ZlaunchError as error:
            return str(error), printed.getvalue()
    return "", printed.getvalue()


def test_what_is_not_elementwise_is_named(tmp_path: Path) -> None:
    for error, printed in run_workers(_tries, 2, "AdamW8bit", True, str(tmp_path)):
        assert not error and "will fail" not in printed
    for error, _ in run_workers(_tries, 2, "LAMB8bit", False, str(tmp_path)):
        assert "LAMB8bit" in error and "needs whole tensors" in error
    for rank, (error, printed) in enumerate(run_workers(_tries, 2, "AdEMAMix8bit", False, str(tmp_path))):
        assert "keeps 'qmap1', a tensor of shape [256], which belongs to no single element" in error
        assert printed.count(f"warning: save_checkpoint will fail: {error}") == (rank == 0)
    # The other rank loses this one.
    errors = [error for error, _ in run_workers(_tries, 2, "AdEMAMix8bit", True, str(tmp_path))]
    assert any("such state cannot be divided" in error for error in errors)


def _refused(folder: str) -> str:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    with pytest.raises(zlaunch.ConfigError) as caught:
        _train("AdamW8bit", zero, folder, False)
    return str(caught.value)


def test_nvme_keeps_no_codes(tmp_path: Path) -> None:
    """Codes were kept as fp32 numbers without their scales, and training went wrong in silence."""
    assert (
        "keeps 'state1', torch.uint8 of shape [8192] for 8192 elements"
        in run_workers(_refused, 1, str(tmp_path))[0]
    )
