"""Test what comes between an optimizer's step and the gathers that begin beside it: see Note [Gathers beside
the step] in runtime/optim/step.py. On pretended GPUs, a race fails a test, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import join, run_workers
from zlaunch.compat.fp32_access import safe_get_full_fp32_param, safe_set_full_fp32_param
from zlaunch.runtime.device import to_device
from zlaunch.runtime.zero.unit import Unit

pytestmark = pytest.mark.multi_gpu
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {
        "stage": 3,
        # few of several blocks are stepped first
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
    },
    "steps_per_print": 1000,
}
Step = Callable[[Any, Any], None]
"""Makes an engine's step of a model, and what surrounds it."""


def _losses(step: Step, passes: Any = nullcontext) -> list[float]:
    """Return this rank's losses of six steps; ``passes`` makes the context of each pass."""
    join()
    model = net(width=32, depth=5)
    engine, *_ = zlaunch.initialize(model=model, config=CONFIG)
    found = []
    for batch in batches(6, 4 * dist.get_world_size()):
        # without a wait of the host, which would order more than the runtime does
        mine = to_device(batch.chunk(dist.get_world_size())[dist.get_rank()], engine.device)
        with passes():
            loss = loss_of(engine, mine)
            engine.backward(loss)
        step(engine, model)
        found.append(loss.detach())
    losses = [float(loss) for loss in found]
    engine.destroy()
    return losses


def _plainly(engine: Any, model: Any) -> None:
    engine.step()


def _other_work(engine: Any) -> None:
    """Use memory of the sizes that units have, and give it back."""
    made = [torch.zeros(unit.numel, device=engine.device, dtype=torch.bfloat16) for unit in engine.units]
    for each in made:
        each.add_(1)


def _while_gathered(engine: Any, model: Any) -> None:
    with zlaunch.zero.GatheredParameters(list(model.parameters())[:3]):
        engine.step()
    _other_work(engine)


_views: list[Tensor] = []
_sums: list[Tensor] = []


def _with_a_view(engine: Any, model: Any) -> None:
    """Read a unit's memory, of which the script has kept a view, after the step."""
    weight = next(model.parameters())
    if not _views:
        with zlaunch.zero.GatheredParameters([weight]):
            _views.append(weight.detach()[:])
    engine.step()
    _sums.append(_views[0].float().sum())


def _with_a_write(engine: Any, model: Any) -> None:
    """Write the values that are there, after the step."""
    engine.step()
    weight = next(model.parameters())
    values = safe_get_full_fp32_param(weight)
    assert values is not None
    safe_set_full_fp32_param(weight, values)


def _and_offload(engine: Any, model: Any) -> None:
    engine.step()
    engine.offload_states()
    assert not any(unit._storage.nbytes() for unit in engine.units if unit.shard_params)
    engine.reload_states()


STEPS: dict[str, Step] = {
    "gathered": _while_gathered,
    "viewed": _with_a_view,
    "written": _with_a_write,
    "offloaded": _and_offload,
}


@pytest.mark.parametrize("name", STEPS)
def test_what_surrounds_a_step_changes_no_loss(name: str) -> None:
    wanted = run_workers(_losses, 2, _plainly)
    assert run_workers(_losses, 2, STEPS[name]) == wanted


class _OtherStream:
    """Runs passes on a stream of their own, where there are streams."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._inside: Any = nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def __enter__(self) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def test_passes_may_run_on_another_stream_than_steps() -> None:
    assert run_workers(_losses, 2, _plainly, _OtherStream) == run_workers(_losses, 2, _plainly)


def _without_memory(engine: Any, model: Any) -> None:
    """Make a step for whose next gathers there is no memory."""
    refill: Any = Unit._refill

    def refused(unit: Unit) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "_refill", refused)
        engine.step()
    assert Unit._refill is refill
    assert not any(unit._storage.nbytes() for unit in engine.units if unit.shard_params)


def test_a_step_without_memory_for_the_next_gathers_is_a_whole_one() -> None:
    assert run_workers(_losses, 2, _without_memory) == run_workers(_losses, 2, _plainly)


def _two_engines() -> list[int]:
    """Return the bytes that a step of one of two engines keeps for its next gathers."""
    join()
    engines = [zlaunch.initialize(model=net(width=32, depth=2), config=CONFIG)[0] for _ in range(2)]
    kept = []
    for batch in batches(3, 4):
        for engine in engines:
            engine.backward(loss_of(engine, batch.to(engine.device)))
            engine.step()
            kept.append(sum(unit._storage.nbytes() for unit in engine.units if unit.shard_params))
    for engine in engines:
        engine.destroy()
    return kept


def test_nothing_is_kept_where_another_engine_may_run_next() -> None:
    assert run_workers(_two_engines, 2) == [[0] * 6] * 2
