"""Test training with optimizer state and masters in fewer than 32 bits: steps, checkpoints, bytes, refusals.

What trains in plain torch here is written anew, by sorting distances and by sets of bits in float64 and
integers; only the random bits' hash is that of the runtime, which a unit test looks at.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import run_workers
from zlaunch.cuda_ops.narrow_twins import for_master, random_bits, round_stochastic
from zlaunch.runtime.optim.slices import ShardSlice
from zlaunch.runtime.zero.store import Access

LRS = {"AdamW": 3e-3, "Adam": 3e-3, "SGD": 0.05, "Lion": 1e-3}
EXTRA: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Lion": {"weight_decay": 0.1}}


def settings(
    stage: int,
    kind: str,
    state: str,
    *,
    masters: str = "",
    offload: bool = False,
    accumulation: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """``masters``: "" for a model in fp32, else bf16.master_weights."""
    world = torch.distributed.get_world_size()
    params = {"lr": LRS[kind], "state_dtype": state, **EXTRA.get(kind, {"weight_decay": 0.1})}
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    if masters:
        more["bf16"] = {"enabled": True, "master_weights": masters}
    optimizer = {"type": kind, "params": params}
    micro = 12 // world // accumulation
    made = config(stage, micro, accumulation, optimizer=optimizer, zero=zero, **more)
    return {**made, "steps_per_print": 10_000}


# -- the same algorithm, once more

_CODES = {
    signed: np.array(
        sorted(
            {0.0, 1.0}
            | {
                sign * 10.0 ** (i - 6) * (0.1 + 0.9 * (cell + 0.5) / cells)
                for i in range(7)
                for cells in [2 ** (i + (not signed))]
                for cell in range(cells)
                for sign in ((1, -1) if signed else (1,))
            }
        )
    )
    for signed in (True, False)
}


def quantised(values: Tensor, signed: bool) -> Tensor:
    """Returns what codes of 8 bits in blocks of 256, with a scale each, keep of float64 values."""
    result = []
    for block in torch.split(values, 256):
        scale = max(block.tolist(), key=lambda x: (abs(x), x))
        if abs(scale) < 2.0**-96:
            result.append(torch.zeros_like(block))
            continue
        ratio = (block / scale).numpy()
        index = np.abs(ratio[:, None] - _CODES[signed][None, :]).argmin(axis=1)
        index = np.where((not signed) & (ratio > 0), np.maximum(index, 1), index)
        result.append(torch.from_numpy(_CODES[signed][index]) * scale)
    return torch.cat(result)


class Reference:
    """Steps flat pieces of the engine's own cut by the formulas, in float64, narrowing after each step."""

    def __init__(
        self, kind: str, state: str, masters: str, pieces: list[tuple[Tensor, tuple[int, int]]]
    ) -> None:
        self.kind, self.state, self.masters = kind, state, masters
        self.values = [leaf.detach().double().clone() for leaf, _ in pieces]
        self.places = [place for _, place in pieces]
        zeros = [torch.zeros_like(value) for value in self.values]
        self.first, self.second = zeros, [zero.clone() for zero in zeros]
        self.steps = 0

    def _kept(self, values: Tensor, bits: Tensor, signed: bool) -> Tensor:
        if self.state == "fp32":
            return values.float().double()
        if self.state == "bf16":
            return round_stochastic(values.float(), bits).double()
        return quantised(values, signed)

    def step(self, grads: list[Tensor]) -> None:
        self.steps += 1
        lr, t = LRS[self.kind], self.steps
        for i, given in enumerate(grads):
            g, w, m, v = given.double(), self.values[i], self.first[i], self.second[i]
            if self.kind == "AdamW":
                w = w * (1 - lr * 0.1)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                w = w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            elif self.kind == "SGD":
                m = g if t == 1 else 0.9 * m + g
                w = w - lr * m
            else:
                w = w * (1 - lr * 0.1) - lr * (0.9 * m + 0.1 * g).sign()
                m = 0.99 * m + 0.01 * g
            key, place = self.places[i]
            bits = random_bits(key, float(t), place, len(w), w.device)
            self.first[i], self.second[i] = self._kept(m, bits, True), self._kept(v, bits >> 16, False)
            if self.masters == "stochastic":
                w = round_stochastic(w.float(), for_master(bits)).double()
            self.values[i] = w


def grad_of(part: ShardSlice) -> Tensor:
    assert part.unit.store is not None
    return part.unit.store.grad().double()


def _follow(kind: str, state: str, masters: str, stage: int, offload: bool, steps: int) -> list[float]:
    """The largest relative differences of masters and states between engine and reference, each step of which
    gets the engine's gradients.
    """
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(
        model=net(width=40), config=settings(stage, kind, state, masters=masters, offload=offload)
    )
    step = engine._shard_step
    assert step is not None
    parts = list(step.slices)
    leaves = [part.leaf for part in parts]
    assert all(leaf is not None for leaf in leaves)
    reference = Reference(kind, state, masters, [(part.leaf, part.place) for part in parts])  # type: ignore[misc]
    for batch in batches(steps, 12):
        engine.backward(loss_of(engine, batch.chunk(engine.world_size)[engine.global_rank]))
        step.wait()
        grads = [part.of(grad_of(part)) / engine.gradient_divisor() for part in parts]
        engine.step()
        step.wait()
        reference.step(grads)
    errors = [0.0, 0.0, 0.0]
    names = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Lion": ("exp_avg",)}[kind]
    for i, part in enumerate(parts):
        store = part.unit.store
        assert store is not None and part.leaf is not None
        found = part.tensors_in(store.open(store.tiles[0], Access.READ).wait(), step.optimizer.state)
        wanted = [reference.values[i], reference.first[i], reference.second[i]]
        mine = [part.leaf.detach(), *(found[name] for name in names)]
        for place, (one, other) in enumerate(zip(mine, wanted, strict=False)):
            apart = (one.double() - other).abs().mean() / other.abs().mean().clamp(min=1e-30)
            errors[place] = max(errors[place], float(apart))
    if masters == "stochastic":
        assert all(leaf is not None and leaf.dtype == torch.bfloat16 for leaf in leaves)
    engine.destroy()
    return errors


_SLOW = pytest.mark.exhaustive
FOLLOWED = [
    ("AdamW", "int8", "stochastic", 3, False, 2),
    ("Lion", "bf16", "fp32", 3, True, 2),
    pytest.param("AdamW", "int8", "", 0, False, 1, marks=_SLOW),
    pytest.param("AdamW", "bf16", "", 1, False, 2, marks=_SLOW),
    pytest.param("AdamW", "int8", "fp32", 2, True, 3, marks=_SLOW),
    pytest.param("AdamW", "bf16", "stochastic", 2, True, 2, marks=_SLOW),
    pytest.param("SGD", "int8", "", 2, False, 2, marks=_SLOW),
    pytest.param("Lion", "int8", "stochastic", 1, False, 3, marks=_SLOW),
]


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "state", "masters", "stage", "offload", "world"), FOLLOWED)
def test_steps_follow_the_algorithm(
    kind: str, state: str, masters: str, stage: int, offload: bool, world: int
) -> None:
    # a value that fp32 puts on the other side of a bound is one digit of bf16, or one code away: the scale of
    # a block of a small layer may be such a value
    limit = 1e-4 if state == "bf16" else 5e-3
    for errors in run_workers(_follow, world, kind, state, masters, stage, offload, 20):
        assert max(errors) < limit, errors


# -- stages, ranks and offload


def _train(cases: list[tuple[Any, ...]]) -> list[Any]:
    zlaunch.init_distributed()
    found = []
    for stage, kind, state, masters, offload in cases:
        engine, *_ = zlaunch.initialize(
            model=net(), config=settings(stage, kind, state, masters=masters, offload=offload)
        )
        for batch in batches(6, 12):
            engine.backward(loss_of(engine, batch.chunk(engine.world_size)[engine.global_rank]))
            engine.step()
        found.append({name: value.double().clone() for name, value in engine.module.state_dict().items()})
        engine.destroy()
    return found


def test_bf16_does_not_depend_on_offload_or_ranks() -> None:
    """Random bits belong to elements: with one rank, two, host memory, every stage, the same values but for
    what the order of sums turns.
    """
    cases = [(0, "AdamW", "bf16", "", False), (2, "AdamW", "bf16", "", False), (2, "AdamW", "bf16", "", True)]
    one, two = run_workers(_train, 1, cases)[0], run_workers(_train, 2, cases)[0]
    for found in [*one, *two]:
        for name, value in one[0].items():
            assert float((found[name] - value).abs().mean()) < 1e-5 < float(value.abs().mean())
    assert all(torch.equal(one[1][name], one[2][name]) for name in one[0]), "offload changes no bit"


# -- accumulation


def _accumulate(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Train with three micro-batches a step; return the dtypes in which gradients rest, and the last ones."""
    zlaunch.init_distributed()
    found = []
    for stage, masters, grad_dtype, offload in cases:
        made = settings(stage, "AdamW", "int8", masters=masters, offload=offload, accumulation=3)
        made["data_types"] = {"grad_accum_dtype": grad_dtype}
        engine, *_ = zlaunch.initialize(model=net(), config=made)
        assert engine._shard_step is not None
        for batch in batches(2, 12):
            for part in batch.chunk(engine.world_size)[engine.global_rank].chunk(3):
                engine.backward(loss_of(engine, part))
                here = [unit.store for unit in engine._shard_step.units if unit.store is not None]
                kept = [store.grad() for store in here if store.has_grad]
                dtypes, grads = {grad.dtype for grad in kept}, [grad.double().clone() for grad in kept]
                engine.step()
        found.append((dtypes, grads))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=_SLOW), 2])
def test_sums_rest_in_the_dtype_that_is_asked_for(stage: int) -> None:
    cases = [
        (stage, "fp32", None, False),
        (stage, "fp32", "bf16", False),
        (stage, "stochastic", None, False),
        (stage, "stochastic", "bf16", False),
        (stage, "fp32", "bf16", True),
        (stage, "stochastic", None, True),
    ]
    for found in run_workers(_accumulate, 2, cases):
        dtypes = [dtypes for dtypes, _ in found]
        wide, narrow = {torch.float32}, {torch.bfloat16}
        assert dtypes == [wide, narrow, wide, narrow, narrow, wide]
        exact = found[0][1]
        for (_, grads), dtype in zip(found, dtypes, strict=True):
            apart = [float((g - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True)]
            assert max(apart) < 0.05 and (dtype == wide or max(apart) > 1e-4)


def _single() -> list[Any]:
    """One micro-batch a step; then two backward passes, which the config does not know of."""
    zlaunch.init_distributed()
    found: list[Any] = []
    for stage in (1, 2):
        made = settings(stage, "AdamW", "bf16", masters="stochastic")
        engine, *_ = zlaunch.initialize(model=net(), config=made)
        assert engine._shard_step is not None
        (batch,) = batches(1, 12)
        own = batch.chunk(engine.world_size)[engine.global_rank]
        grads = []
        for _ in range(2):
            engine.backward(loss_of(engine, own))
            grads.append([unit.store.grad().clone() for unit in engine._shard_step.units if unit.store])
        dtypes = [{g.dtype for g in each} for each in grads]
        pairs = [(one.double(), two.double()) for one, two in zip(*grads, strict=True)]
        ratio = max(float((two / 2 - one).norm() / one.norm()) for one, two in pairs)
        engine.step()
        engine.backward(loss_of(engine, own))
        found.append((dtypes, ratio))
        engine.destroy()
    return found


def test_a_single_gradient_rests_in_bf16_and_a_sum_does_not() -> None:
    for found in run_workers(_single, 2):
        for dtypes, ratio in found:
            assert dtypes == [{torch.bfloat16}, {torch.float32}] and ratio < 1e-2


def _only(cases: list[tuple[int, str, str | None]]) -> list[Any]:
    """Train with one micro-batch a step; return the dtypes in which gradients rest, how many buckets were
    copied into memory of their own, and the weights.
    """
    zlaunch.init_distributed()
    found = []
    for stage, optimizer, grad_dtype in cases:
        made = settings(stage, optimizer, "fp32", masters="fp32")
        made["data_types"] = {"grad_accum_dtype": grad_dtype}
        engine, *_ = zlaunch.initialize(model=net(), config=made)
        assert engine._shard_step is not None
        pool = engine._reducer._pool
        copied: list[Tensor] = []
        pool.give_back = copied.append  # type: ignore[assignment, method-assign]
        dtypes = set()
        for batch in batches(3, 12):
            engine.backward(loss_of(engine, batch))
            dtypes |= {unit.store.grad().dtype for unit in engine._shard_step.units if unit.store is not None}
            engine.step()
        found.append((dtypes, len(copied), [value.clone() for value in engine.module.state_dict().values()]))
        engine.destroy()
    return found


def test_the_only_gradient_of_a_step_rests_as_it_was_reduced_and_trains_bit_for_bit_the_same() -> None:
    cases = [(stage, kind) for stage in (0, 1, 2, 3) for kind in ("AdamW", "SGD")]
    asked = [(*case, dtype) for case in cases for dtype in (None, "fp32")]
    (found,) = run_workers(_only, 1, asked)
    for (stage, kind), narrow, wide in zip(cases, found[::2], found[1::2], strict=True):
        assert narrow[0] == {torch.bfloat16} and wide[0] == {torch.float32}
        assert narrow[1] == 0 and (wide[1] > 0) == (stage >= 2), "what a rank alone has made is its sum"
        assert all(map(torch.equal, narrow[2], wide[2])), (stage, kind)


# -- bytes


def _bytes(state: str, masters: str, stage: int, offload: bool) -> dict[str, float]:
    """The bytes for each parameter that a rank keeps between backward pass and step."""
    zlaunch.init_distributed()
    made = settings(stage, "AdamW", state, masters=masters, offload=offload)
    engine, *_ = zlaunch.initialize(model=net(width=256, depth=2), config=made)
    step = engine._shard_step
    assert step is not None
    for batch in batches(2, 12):
        engine.backward(loss_of(engine, batch.chunk(engine.world_size)[engine.global_rank]))
        found: dict[str, dict[int, int]] = {}

        def add(kind: str, tensor: Tensor, found: dict[str, dict[int, int]] = found) -> None:
            storage = tensor.untyped_storage()
            if all(storage.data_ptr() not in other for other in found.values()):
                found.setdefault(kind, {})[storage.data_ptr()] = storage.nbytes()

        for unit in step.units:
            assert unit.store is not None
            add("parameters", unit.full)
            if unit.store.master is not None:
                add("masters", unit.store.master)
            add("gradients", unit.store.grad())
        for own in step.optimizer.state.values():
            for key, value in own.items():
                if key != "step" and value.numel():
                    add(key, value)
        engine.step()
    numel = sum(unit.numel for unit in step.units)
    sizes = {kind: sum(each.values()) / numel for kind, each in found.items()}
    engine.destroy()
    return sizes


_CODES_OF_BOTH = {"exp_avg": 1, "exp_avg_sq": 1, "exp_avg_scale": 4 / 256, "exp_avg_sq_scale": 4 / 256}


@pytest.mark.parametrize(
    ("state", "masters", "offload", "wanted"),
    [
        ("fp32", "fp32", False, {"masters": 4, "gradients": 2, "exp_avg": 4, "exp_avg_sq": 4}),
        ("bf16", "stochastic", False, {"gradients": 2, "exp_avg": 2, "exp_avg_sq": 2}),
        ("int8", "stochastic", False, {"gradients": 2, **_CODES_OF_BOTH}),
        ("int8", "stochastic", True, {"masters": 2, "gradients": 2, **_CODES_OF_BOTH}),
    ],
)
def test_bytes_a_parameter(state: str, masters: str, offload: bool, wanted: dict[str, float]) -> None:
    (found,) = run_workers(_bytes, 1, state, masters, 2, offload)
    wanted = {"parameters": 2, **wanted}
    assert found.keys() == wanted.keys()
    for kind, size in wanted.items():
        assert size <= found[kind] * 1.01 and found[kind] <= size * 1.01 + 0.001, (kind, found)


# -- checkpoints, and what scripts see


def _run(engine: Any, data: list[Tensor]) -> None:
    for batch in data:
        engine.backward(loss_of(engine, batch.chunk(engine.world_size)[engine.global_rank]))
        engine.step()


def _content(engine: Any) -> dict[str, Tensor]:
    """Weights, and the moments as scripts get them, by name."""
    found = {name: value.double().clone() for name, value in engine.module.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = zlaunch.safe_get_full_optimizer_state(parameter, key)
            assert value is not None and value.dtype == torch.float32
            found[f"{name}/{key}"] = value.double()
        value = zlaunch.safe_get_full_fp32_param(parameter)
        assert value is not None
        found[f"{name}/master"] = value.double()
    return found


def _save(folder: str, state: str, masters: str, stage: int, offload: bool) -> dict[str, Tensor]:
    zlaunch.init_distributed()
    made = settings(stage, "AdamW", state, masters=masters, offload=offload)
    engine, *_ = zlaunch.initialize(model=net(), config=made)
    data = batches(7, 12)
    _run(engine, data[:4])
    engine.save_checkpoint(folder, tag="four")
    saved = _content(engine)
    _run(engine, data[4:])
    wanted = _content(engine)
    engine.destroy()
    engine, *_ = zlaunch.initialize(model=net(), config=made)
    engine.load_checkpoint(folder, tag="four")
    assert _differ(_content(engine), saved) == []
    _run(engine, data[4:])
    assert _differ(_content(engine), wanted) == [], "a resumed run takes the same steps"
    parts = copy.deepcopy(engine.optimizer.state_dict())
    assert all(
        value.dtype == torch.float32 and not key.endswith("_scale")
        for own in parts["state"].values()
        for key, value in own.items()
    )
    before = _content(engine)
    _run(engine, data[:1])
    engine.load_checkpoint(folder, tag="four", load_optimizer_states=False)
    _run(engine, data[:1])
    engine.optimizer.load_state_dict(parts)
    after = _content(engine)
    moments = [name for name in before if "/exp" in name]
    assert _differ({n: before[n] for n in moments}, {n: after[n] for n in moments}) == []
    module: Any = engine.module
    parameter = module.layers[0].up.weight
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    zlaunch.safe_set_full_optimizer_state(parameter, value, "exp_avg")
    got = zlaunch.safe_get_full_optimizer_state(parameter, "exp_avg")
    apart = float("nan") if got is None else float((got - value).abs().max())
    assert apart < 0.05 and (apart > 0) == (state != "fp32")
    if not offload:
        engine.offload_states()
        assert engine._shard_step is not None
        tensors = [v for own in engine._shard_step.optimizer.state.values() for v in own.values()]
        assert not any(v.untyped_storage().nbytes() for v in tensors if v.dim())
        engine.reload_states()
        again = zlaunch.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert again is not None and got is not None and torch.equal(again, got)
    engine.destroy()
    return saved


def _differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in left.keys() | right.keys() if not torch.equal(left[name], right[name])]


def _load(folder: str, state: str, masters: str, stage: int) -> dict[str, Tensor]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=settings(stage, "AdamW", state, masters=masters))
    engine.load_checkpoint(folder, tag="four")
    found = _content(engine)
    _run(engine, batches(1, 12))
    engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("state", "masters", "stage", "offload"),
    [
        ("int8", "stochastic", 3, False),
        pytest.param("bf16", "fp32", 1, True, marks=_SLOW),
        pytest.param("fp32", "stochastic", 2, False, marks=_SLOW),
    ],
)
def test_checkpoints(tmp_path: Path, state: str, masters: str, stage: int, offload: bool) -> None:
    folder = str(tmp_path)
    saved = run_workers(_save, 2, folder, state, masters, stage, offload)[0]
    wide = run_workers(_load, 3, folder, "fp32", "fp32", 2)[0]
    assert _differ(wide, saved) == [], "files have plain fp32"
    there = run_workers(_load, 1, folder, state, masters, 0)[0]
    if state != "int8":
        assert _differ(there, saved) == [], "bf16 in fp32 is exact"
    for name, value in there.items():
        # one more rounding to codes: half of the widest gap, of a block's largest; blocks cross parameters
        key = name.rpartition("/")[2]
        alike = [each for each in saved if each.rpartition("/")[2] == key]
        largest = max(float(saved[each].abs().max()) for each in alike)
        limit = 0.0071 * largest if "/exp_avg" in name and state == "int8" else 0.0
        assert float((value - saved[name]).abs().max()) <= limit
    other = run_workers(_load, 2, folder, "int8" if state != "int8" else "bf16", masters, 2)[0]
    for name, value in other.items():
        scale = saved[name].abs().mean()
        assert float((value - saved[name]).abs().mean()) <= 0.05 * float(scale), name


# -- refusals


def _refused(folder: str) -> list[str]:
    zlaunch.init_distributed()
    said = []
    nvme = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    adagrad = {"type": "Adagrad", "params": {"state_dtype": "int8"}}
    maximize = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "maximize": True}}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({**settings(1, "AdamW", "int8"), "optimizer": adagrad}, net()),
        ({**settings(1, "AdamW", "int8"), "zero_optimization": nvme}, net()),
        (settings(1, "AdamW", "int8"), net().double()),
        (settings(1, "Lion", "int4"), net()),
        ({**settings(0, "SGD", "fp32", masters="stochastic"), "optimizer": maximize}, net()),
    ]
    for made, model in cases:
        try:
            zlaunch.initialize(model=model, config=made)
            said.append("")
        except (ValueError, zlaunch.ZlaunchError) as error:
            said.append(str(error))
    return said


def test_refusals(tmp_path: Path) -> None:
    said = run_workers(_refused, 1, str(tmp_path))[0]
    words = [
        "Adagrad supports fp32 state only",
        "state on NVMe is fp32",
        "torch.float64",
        "int4",
        "maximize of SGD",
    ]
    assert all(word in text for word, text in zip(words, said, strict=True)), said
