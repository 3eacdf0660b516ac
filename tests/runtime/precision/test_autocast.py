"""Test fp32 training under torch.autocast beside plain torch under it: every micro-batch of every rank by
itself, so that both round alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.model_parallel import SIZES
from tests.runtime.models import Net, batches, config, loss_of, relative_error, with_forward
from tests.runtime.workers import join, run_workers

BF16: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FP16: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
SGD = {"type": "SGD", "params": {"lr": 0.5}}
STEPS, SAMPLES = 4, 8


class Recomputed(Net):
    """Recomputes its layers by torch's own checkpoint, and uses one of them outside of it as well: under
    no_grad, which a reentrant checkpoint has, a cached cast of its weights would have no gradient.
    """

    reentrant = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(self.layers[0](x)))


class Recomputed2(Recomputed):
    reentrant = False


def _built(kind: str) -> Net:
    torch.manual_seed(7)
    model = {"reentrant": Recomputed, "not reentrant": Recomputed2}.get(kind, Net)(tied=kind == "tied")
    if kind == "frozen":
        model.layers[0].requires_grad_(False)
        model.embedding.requires_grad_(False)
    return model


@cache
def _plain(kind: str, micros: int, autocast: torch.dtype | None) -> Net:
    """Train in one process on micro-batches, one after the other."""
    model = _built(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(STEPS, SAMPLES):
        for micro in batch.chunk(micros):
            (loss_of(_under(model, autocast), micro) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _under(model: nn.Module, autocast: torch.dtype | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        context: Any = nullcontext()
        if autocast is not None:
            context = torch.autocast("cpu", autocast, cache_enabled=False)
        with context:
            return model(*args, **kwargs)

    return call


def _micros(engine: Any, batch: Tensor) -> Iterator[Tensor]:
    rank, count = engine.global_rank, engine.gradient_accumulation_steps()
    yield from batch.chunk(engine.world_size * count)[rank * count : (rank + 1) * count]


def _error(engine: Any, plain: nn.Module) -> float:
    mine = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return max(relative_error(mine[name], value) for name, value in plain.state_dict().items())


def _trained(
    stage: int, kind: str, accumulation: int, section: dict[str, Any], **more: Any
) -> tuple[float, float]:
    """Return the error beside plain torch under autocast, and beside plain torch without."""
    extra: dict[str, Any] = {**section, "optimizer": SGD, "zero_allow_untested_optimizer": True, **more}
    if kind == "checkpointed":
        extra["activation_checkpointing"] = {"enabled": True}
    model = _built(kind)
    settings = config(stage, SAMPLES // (2 * accumulation), accumulation, **extra)
    engine, *_ = zlaunch.initialize(model=model, config=settings)
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    caller: Any = engine
    if kind == "compiled":
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    if kind == "script's own":

        def caller(x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.float16):  # the config's goes before it
                return engine(x)

    for batch in batches(STEPS, SAMPLES):
        parts = list(_micros(engine, batch))
        for i, micro in enumerate(parts):
            if kind == "evaluated":
                with torch.no_grad():
                    engine(micro[:, :-1])
            if kind == "no_sync" and i < len(parts) - 1:
                with engine.no_sync():
                    engine.backward(loss_of(caller, micro))
            else:
                engine.backward(loss_of(caller, micro))
            engine.step()
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    kind = kind if type(model) is not Net or kind in ("tied", "frozen") else "plain"
    wanted = [_plain(kind, 2 * accumulation, lower) for lower in (engine._precision.autocast, None)]
    errors = _error(engine, wanted[0]), _error(engine, wanted[1])
    engine.destroy()
    return errors


def _all(kinds: list[tuple[str, int]], section: dict[str, Any], stages: list[int]) -> dict[Any, Any]:
    join()
    return {
        (stage, *each): _trained(stage, *each, section)
        for stage in stages
        for each in kinds
        if each[0] != "no_sync" or stage < 2
    }


KINDS = [
    ("plain", 1),
    ("checkpointed", 2),
    ("reentrant", 1),
    ("not reentrant", 1),
    ("tied", 1),
    ("frozen", 1),
    ("evaluated", 2),
    ("no_sync", 2),
    ("script's own", 1),
]


def _compare(found: dict[Any, tuple[float, float]]) -> None:
    for case, (error, without) in found.items():
        assert error < 2e-4 and error < 0.1 * without, (case, error, without)


@pytest.mark.rotated
def test_training_is_plain_torch_under_autocast() -> None:
    for found in run_workers(_all, 2, KINDS, BF16, [0, 3]):
        _compare(found)


def test_training_at_the_stages_between() -> None:
    _compare(run_workers(_all, 2, [("plain", 2), ("no_sync", 2)], BF16, [1, 2])[0])


@pytest.mark.exhaustive
def test_a_compiled_model() -> None:
    _compare(run_workers(_all, 2, [("compiled", 1)], BF16, [3])[0])


def _overflows(section: dict[str, Any], stage: int) -> dict[str, Any]:
    """Train under autocast to fp16; one rank's second step overflows."""
    rank = join()
    extra: dict[str, Any] = {**section, "optimizer": SGD, "zero_allow_untested_optimizer": True}
    engine, *_ = zlaunch.initialize(model=_built("plain"), config=config(stage, 2, **extra))
    plain = _built("plain")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu")
    scales, dtypes = [], set()
    for step, batch in enumerate(batches(STEPS, 4)):
        bad = float("inf") if step == 1 else 1.0
        mine = batch.chunk(2)[rank]
        with torch.no_grad():
            dtypes.add(engine(mine[:, :-1]).dtype)
        loss = loss_of(engine, mine)
        engine.backward(loss * bad if rank == 1 else loss)
        engine.step()
        for i, micro in enumerate(batch.chunk(2)):
            its = loss_of(_under(plain, torch.float16), micro) / 2
            scaler.scale(its * bad if i == 1 else its).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append((engine.loss_scale, scaler.get_scale()))
    return {
        "error": _error(engine, plain),
        "scales": scales,
        "dtypes": dtypes,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
    }


@pytest.mark.parametrize(
    ("section", "stage"), [(FP16, 0), (FP16, 3), ({"amp": {"enabled": True, "opt_level": "O1"}}, 2)]
)
def test_fp16_is_grad_scaler(section: dict[str, Any], stage: int) -> None:
    for found in run_workers(_overflows, 2, section, stage):
        assert found["scales"] == [(65536.0, 65536.0)] + [(32768.0, 32768.0)] * 3
        assert found["skipped"] == 1 and found["steps"] == STEPS
        assert found["dtypes"] == {torch.float16} and found["error"] < 2e-4


def _resumed(folder: str) -> list[list[float]]:
    join()
    losses = []
    for first in (True, False):
        engine, *_ = zlaunch.initialize(model=_built("plain"), config=config(3 if first else 1, 2, **FP16))
        if first:
            (mine,) = _micros(engine, batches(1, 4)[0])
            engine.backward(loss_of(engine, mine) * float("inf"))
            engine.step()
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        losses.append([engine.loss_scale, engine.skipped_steps, *_losses_of(engine), engine.loss_scale])
        engine.destroy()
    return losses


def _losses_of(engine: Any) -> Iterator[float]:
    for batch in batches(3, 4):
        (mine,) = _micros(engine, batch)
        loss = loss_of(engine, mine)
        engine.backward(loss)
        engine.step()
        yield loss.item()


def test_a_checkpoint_has_the_loss_scale(tmp_path: Path) -> None:
    for before, after in run_workers(_resumed, 2, str(tmp_path)):
        assert before[0] == 32768.0 and before[1] == 1
        assert after == pytest.approx(before, rel=1e-4)


def _outside() -> dict[str, torch.dtype]:
    """Calls the model around the engine, which is not under autocast. An inner autocast goes before the
    engine's, and a pass that ends in an exception leaves none behind.
    """
    join()
    model = _built("plain")
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 2, **BF16))
    tokens = batches(1, 2)[0][:, :-1]
    with torch.no_grad():
        found = {"engine": engine(tokens).dtype, "module": engine.module(tokens).dtype}
        engine.eval()
        found["eval"] = engine(tokens).dtype
        engine.train()

    def inner(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), model.head.weight)

    with_forward(model.head, inner)
    output = engine(tokens)
    found["inner"] = output.dtype
    engine.backward(output.sum())
    engine.step()

    def fails(x: Tensor) -> Tensor:
        raise ValueError("planned")

    with_forward(model.head, fails)
    with pytest.raises(ValueError, match="planned"):
        engine(tokens)
    assert not torch.is_autocast_enabled("cpu")
    return found


def test_what_runs_under_autocast() -> None:
    assert run_workers(_outside, 2)[0] == {
        "engine": torch.bfloat16,
        "module": torch.float32,
        "eval": torch.bfloat16,
        "inner": torch.float32,
    }


def _with_bf16_parameters(stage: int) -> list[float]:
    """Train with parameters in bf16 and masters in fp32, under autocast; return the losses beside torch's."""
    join()
    section: dict[str, Any] = {**BF16, "bf16": {"enabled": True}, "optimizer": SGD}
    engine, *_ = zlaunch.initialize(model=_built("plain"), config=config(stage, SAMPLES, **section))
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    masters = [p.detach().clone() for p in _built("plain").parameters()]
    plain = _built("plain").bfloat16()
    errors = []
    for batch in batches(STEPS, SAMPLES):
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            parameter.data.copy_(master)
            parameter.grad = None
        loss = loss_of(_under(plain, torch.bfloat16), batch)
        loss.backward()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.sub_(parameter.grad.float(), alpha=0.5)
        own = loss_of(engine, batch)
        engine.backward(own)
        engine.step()
        errors.append(abs(own.item() - loss.item()))
    return errors


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_in_bf16_under_autocast(stage: int) -> None:
    assert run_workers(_with_bf16_parameters, 1, stage)[0] == [0.0] * STEPS


def _pipelined() -> tuple[list[float], list[float], list[float]]:
    """Return losses of two stages under autocast, of plain torch under it, and of plain torch without."""
    join()
    extra: dict[str, Any] = {"optimizer": SGD, "zero_allow_untested_optimizer": True}
    settings = config(1, 2, SAMPLES // 2, **BF16, **extra, parallel={"pipeline": 2})
    micros = [
        [{"input_ids": micro, "labels": micro} for micro in batch.chunk(SAMPLES // 2)]
        for batch in batches(STEPS, SAMPLES)
    ]
    engine, *_ = zlaunch.initialize(model=_llama(), config=settings)
    losses = [engine.train_batch(iter(each)).item() for each in micros]
    losses.append(engine.eval_batch(iter(micros[0])).item())
    return losses, _plain_llama(micros, torch.bfloat16), _plain_llama(micros, None)


def _llama() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**SIZES, "num_hidden_layers": 4})
    )


def _plain_llama(steps: list[list[dict[str, Tensor]]], autocast: torch.dtype | None) -> list[float]:
    model, losses = _llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for micros in [*steps, steps[0]]:
        total = 0.0
        for micro in micros:
            loss = _under(model, autocast)(**micro).loss / len(micros)
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.exhaustive
def test_stages_of_a_pipeline() -> None:
    pytest.importorskip("transformers")
    for losses, wanted, without in run_workers(_pipelined, 2):
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert losses != pytest.approx(without, abs=1e-4)
