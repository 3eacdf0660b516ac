"""Test that each token counts the same with ``loss_reduction`` "tokens", whatever micro-batch it is in.

The reference is plain torch in one process: the sum of all tokens' losses divided by their number, in
float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.needs import needs_package
from tests.runtime import model_parallel
from tests.runtime.models import batches, config, net, relative_error
from tests.runtime.workers import join, run_workers

IGNORED = -100
STEPS, SAMPLES, LENGTH, CLIP, TOLERANCE = 4, 8, 6, 0.05, 1e-9
BY_TOKENS: dict[str, Any] = {"loss_reduction": "tokens"}


def _masked(tokens: Tensor) -> Tensor:
    """Return labels of which each sample has another number: 0 in the first, all but a few in the last."""
    labels = tokens.clone()
    samples, length = labels.shape
    for sample in range(samples):
        labels[sample, : length - sample * length // samples] = IGNORED
    return labels


def _data() -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and labels of each step, those of all ranks."""
    return [(batch[:, :-1], _masked(batch[:, 1:])) for batch in batches(STEPS, SAMPLES, LENGTH)]


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the tokens: NaN for none."""
    return _mean(model(inputs), labels)


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def _own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean as scripts write it: 0 / 0 for no tokens, whose gradient is NaN as well."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    mask = (labels != IGNORED).flatten()
    return (each * mask).sum() / mask.sum()


def _pair(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return _mean(logits, labels), _count(labels)


def _train_plain(clip: float) -> tuple[dict[str, Tensor], list[float]]:
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for inputs, labels in _data():
        loss = _loss(model, inputs, labels)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses


def _micro_batches(engine: Any, inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's micro-batches of a step."""
    count = engine.gradient_accumulation_steps()
    first = engine.data_parallel_rank * count
    parts = engine.data_parallel_size * count
    pairs = list(zip(inputs.chunk(parts), labels.chunk(parts), strict=True))
    return [(a.to(engine.device), b.to(engine.device)) for a, b in pairs[first : first + count]]


def _train(engine: Any) -> list[float]:
    """Train in the ways that a script can; return the mean losses."""
    losses = []
    for step, (inputs, labels) in enumerate(_data()):
        micro_batches = _micro_batches(engine, inputs, labels)
        if step == STEPS - 1:
            losses.append(engine.train_batch(iter(micro_batches), _pair).item())
            continue
        for own, wanted in micro_batches:
            loss = _own_mean(engine(own), wanted) if step < 2 else _loss(engine, own, wanted)
            if step == 0:
                engine.backward(loss, num_tokens=int(_count(wanted)))
            elif step == 1:
                engine.backward(loss, num_tokens=_count(wanted))
            else:
                engine.scale(loss, num_tokens=_count(wanted)).backward()
            engine.step()
        losses.append(float(engine.step_metrics()["train_loss"]))
    return losses


CASES: list[dict[str, Any]] = [
    *({"stage": stage, "accumulation": 2, "clip": CLIP} for stage in range(4)),
    {"stage": 1, "accumulation": 4, "clip": 0.0, "prescale_gradients": True},
    {"stage": 2, "accumulation": 1, "clip": 0.0, "zero": {"offload_optimizer": {"device": "cpu"}}},
]


def _train_cases() -> list[tuple[float, list[float]]]:
    join()
    found = []
    for case in CASES:
        given = dict(case)
        stage = given.pop("stage")
        accumulation = given.pop("accumulation")
        clip = given.pop("clip")
        micro = SAMPLES // 2 // accumulation
        settings = config(stage, micro, accumulation, clip, **given, **BY_TOKENS)
        engine, *_ = zlaunch.initialize(model=net().double(), config=settings)
        losses = _train(engine)
        wanted = _train_plain(clip)[0]
        state = engine.module.state_dict()
        error = max(relative_error(state[name].cpu(), value) for name, value in wanted.items())
        found.append((error, losses))
        engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_every_token_counts_the_same() -> None:
    """The first micro-batch of rank 0 has no token at all: torch's mean of its losses is NaN."""
    for rank, found in enumerate(run_workers(_train_cases, 2)):
        for case, (error, losses) in zip(CASES, found, strict=True):
            assert error < TOLERANCE, (rank, case)
            assert losses == pytest.approx(_train_plain(case["clip"])[1], rel=TOLERANCE), (rank, case)


# -- other axes


def _hf_data() -> list[tuple[Tensor, Tensor]]:
    return [(batch, _masked(batch)) for batch in model_parallel.data()]


def _hf_pair(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return _pair(output.logits[:, :-1], labels[:, 1:])


def _train_plain_hf(family: str) -> dict[str, Tensor]:
    model = model_parallel.make(family, "sdpa", num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=model_parallel.EPS)
    for inputs, labels in _hf_data():
        _hf_pair(model(input_ids=inputs), labels)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor] = model.state_dict()
    return state


def _train_axes(family: str, parallel: dict[str, int], stage: int, count: int) -> float:
    """Return the error of the weights after steps of ``count`` micro-batches."""
    join()
    wanted = _train_plain_hf(family)
    shared = math.prod(size for axis, size in parallel.items() if axis != "expert")
    data_size = torch.distributed.get_world_size() // shared
    settings = model_parallel.settings(
        stage, 1, data_size * count, parallel=parallel, gradient_clipping=0.0, **BY_TOKENS
    )
    engine, *_ = zlaunch.initialize(
        model=model_parallel.make(family, "sdpa", num_hidden_layers=4),
        config={**settings, "gradient_accumulation_steps": count},
    )
    for inputs, labels in _hf_data():
        named = [
            {"input_ids": own, "labels": targets, "num_tokens": _count(targets[:, 1:])}
            for own, targets in _micro_batches(engine, inputs, labels)
        ]
        engine.train_batch(iter(named))
    return model_parallel.distance(engine.module.state_dict(), wanted)


@pytest.mark.rotated
@needs_package("transformers")
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "parallel", "stage", "count"),
    [
        ("llama", {"tensor": 2}, 1, 2),
        ("llama", {"sequence": 2}, 3, 2),
        ("llama", {"pipeline": 2}, 1, 4),
        ("mixtral", {"expert": 2}, 2, 2),
        ("llama", {"tensor": 2, "sequence": 2}, 0, 2),
        ("llama", {"pipeline": 2, "sequence": 2}, 0, 4),
    ],
    ids=["tensor", "sequence", "pipeline", "expert", "tensor and sequence", "pipeline and sequence"],
)
def test_every_token_counts_the_same_on_all_axes(
    family: str, parallel: dict[str, int], stage: int, count: int
) -> None:
    assert max(run_workers(_train_axes, 4, family, parallel, stage, count)) < TOLERANCE


# -- fp16, and what is refused


def _train_fp16() -> list[float]:
    """Return the losses of fp16 training, and those of fp32."""
    join()
    losses = []
    for section in ({"fp16": {"enabled": True, "initial_scale_power": 12}}, {}):
        engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2, 2, CLIP, **section, **BY_TOKENS))
        losses += _train(engine)
        assert engine.skipped_steps == 0
        engine.destroy()
    return losses


@pytest.mark.multi_gpu
def test_the_loss_scale_applies_too() -> None:
    for losses in run_workers(_train_fp16, 2):
        assert losses[:STEPS] == pytest.approx(losses[STEPS:], rel=5e-3)


def _messages() -> list[str]:
    """Return the messages of what is refused."""
    join()
    found = []
    inputs, labels = _data()[0]

    def note(call: Any) -> None:
        with pytest.raises((zlaunch.ParameterError, TypeError, ValueError, RuntimeError)) as error:
            call()
        found.append(f"{type(error.value).__name__}: {error.value}")

    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 4, 1, **BY_TOKENS))
    note(lambda: engine.backward(_loss(engine, inputs, labels)))
    note(lambda: _loss(engine, inputs, labels).backward())
    note(lambda: engine.backward(_loss(engine, inputs, labels), num_tokens=2.5))  # type: ignore[arg-type]
    note(lambda: engine.backward(_loss(engine, inputs, labels), num_tokens=-1))
    note(lambda: engine.backward(_loss(engine, inputs, labels), num_tokens=labels != IGNORED))
    note(lambda: engine.backward(_loss(engine, inputs, labels), scale_wrt_gas=False, num_tokens=3))
    note(lambda: engine.train_batch(iter([(inputs, labels)]), _mean))
    unused = engine.scale(_loss(engine, inputs, labels), num_tokens=3)
    note(lambda: engine.scale(_loss(engine, inputs, labels), num_tokens=3))
    (unused * 0).backward()
    engine.zero_grad()
    engine.backward(_loss(engine, inputs, labels), num_tokens=_count(labels))
    note(lambda: zlaunch.safe_get_full_grad(next(iter(engine.module.parameters()))))
    engine.destroy()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 4, 1))
    note(lambda: engine.backward(_loss(engine, inputs, labels), num_tokens=3))
    note(lambda: engine.train_batch(iter([(inputs, labels)]), _pair))
    engine.destroy()
    one_bit = {"type": "OneBitAdam", "params": {"freeze_step": 2}}
    note(lambda: zlaunch.initialize(model=net(), config=config(0, 4, optimizer=one_bit, **BY_TOKENS)))
    return found


def test_what_is_refused() -> None:
    wanted = [
        'ParameterError: loss_reduction is "tokens": call engine.backward(loss, num_tokens=...) with',
        'ParameterError: loss_reduction is "tokens": call engine.backward(loss, num_tokens=...) instead of',
        "TypeError: num_tokens is 2.5, expected a whole number",
        "ValueError: num_tokens is -1, expected a number from 0",
        "TypeError: num_tokens is a torch.bool tensor of shape [8, 6], expected one whole number",
        "ParameterError: scale_wrt_gas=False",
        'ParameterError: loss_reduction is "tokens": add "num_tokens" to the micro-batch, or return',
        "ParameterError: engine.scale() again before the backward pass",
        'ParameterError: loss_reduction is "tokens": before engine.step()',
        "ParameterError: num_tokens has no effect",
        "ParameterError: num_tokens has no effect",
        'OptimizerError: loss_reduction "tokens" is not supported with OneBitAdam',
    ]
    for found in run_workers(_messages, 1):
        for message, begin in zip(found, wanted, strict=True):
            assert message.startswith(begin)
