"""Test what a user sees of parameters between their uses, and what the module's methods do."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.errors import ParameterError, RankMismatchError


def _sharded_look() -> None:
    zlaunch.init_distributed()
    model = net()
    weight = model.layers[1].up.weight
    shape = weight.shape
    zlaunch.initialize(model=model, config=config(3, 2))
    assert weight.shape == shape and weight.requires_grad and isinstance(weight, torch.nn.Parameter)
    assert torch.isnan(weight).all() and weight.detach().sum().isnan()
    with torch.no_grad():
        assert weight.sum().isnan()
    with pytest.raises(ParameterError, match=r"layers\.1\.up\.weight is sharded"):
        weight.sum()
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.copy_(torch.ones(shape))
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    with pytest.raises(RuntimeError, match="convert it before"):
        model.half()
    with pytest.raises(RuntimeError, match="convert it before"):
        model.layers[0].double()
    assert model.to(torch.float32) is model


def test_a_sharded_parameter_is_never_garbage() -> None:
    run_workers(_sharded_look, 2)


def _copies() -> None:
    """At stages 0 to 2 a copy of the model is a plain model of its own."""
    rank = join()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=config(1, 2))
    batch = batches(1, 4)[0].chunk(2)[rank]
    engine.backward(loss_of(engine, batch))
    engine.step()
    average: Any = copy.deepcopy(engine.module)
    assert relative_error(loss_of(average, batch), loss_of(engine, batch)) < 1e-5
    assert average.double().head.weight.dtype == torch.float64
    assert model.head.weight.dtype == torch.float32


def test_a_copy_is_a_plain_model() -> None:
    run_workers(_copies, 2)


def _values_after_step(stage: int) -> None:
    """Right after step() every way to read a parameter gives the new values, the same on all ranks."""
    rank = join()
    model = net()
    kept = list(model.parameters())  # references from before, as a moving average would hold
    engine, *_ = zlaunch.initialize(model=model, config=config(stage, 2))
    for batch in batches(3, 4):
        engine.backward(loss_of(engine, batch.chunk(2)[rank]))
        engine.step()
        direct = [p.detach().clone() for p in kept]
        state = list(model.state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(direct, state, strict=True))
        assert all(p.isfinite().all() for p in direct)
        everyone: list[Any] = [None, None]
        torch.distributed.all_gather_object(everyone, [p.tolist() for p in direct])
        assert everyone[0] == everyone[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_can_be_read_right_after_a_step(stage: int) -> None:
    run_workers(_values_after_step, 2, stage)


def _load(stage: int, bf16: bool) -> None:
    """load_state_dict reaches the master copies: training goes on from what was loaded."""
    zlaunch.init_distributed()
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
    data = batches(4, 4)
    first, *_ = zlaunch.initialize(model=net(), config=config(stage, 2, **extra))
    train_engine(first, data)
    saved = {name: value.clone() for name, value in first.module.state_dict().items()}
    second, *_ = zlaunch.initialize(model=net(depth=3), config=config(stage, 2, **extra))
    second.module.load_state_dict(saved)
    for name, value in second.module.state_dict().items():
        assert torch.equal(value, saved[name]), name
    third_model = net()
    third_model.load_state_dict(saved)
    third, *_ = zlaunch.initialize(model=third_model, config=config(stage, 2, **extra))
    assert train_engine(second, data) == train_engine(third, data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_load_state_dict(stage: int, bf16: bool) -> None:
    run_workers(_load, 2, stage, bf16)


def _save(stage: int, folder: str, name: str) -> dict[str, torch.Tensor]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(tied=True), config=config(stage, 2))
    train_engine(engine, batches(2, 4))
    engine.save_16bit_model(folder, name)
    return {key: value.numpy() for key, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_saved_weights_load_with_plain_torch(stage: int, tmp_path: Any) -> None:
    wanted = run_workers(_save, 2, stage, str(tmp_path), "pytorch_model.bin")[0]
    got = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], torch.from_numpy(wanted[key])) for key in wanted)
    storages: dict[int, list[str]] = {}
    for key, value in got.items():
        storages.setdefault(value.data_ptr(), []).append(key)
    assert [keys for keys in storages.values() if len(keys) > 1] == [["embedding.weight", "head.weight"]]
    net(tied=True).load_state_dict(got)
    assert [p.name for p in tmp_path.iterdir()] == ["pytorch_model.bin"]


def _save_error(folder: str) -> str:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2))
    with pytest.raises(OSError, match="cannot write") as caught:
        engine.save_16bit_model(f"{folder}/file/inside")
    return str(caught.value)


def test_a_failed_save_is_told_to_every_rank(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = run_workers(_save_error, 2, str(tmp_path))
    assert first == second


def _mismatch(kind: str) -> str:
    rank = join()
    model = net(depth=3 if rank == 0 or kind != "depth" else 2)
    if kind == "shape" and rank == 1:
        model.layers[1].up = torch.nn.Linear(24, 50)
    settings = config(1 if rank == 0 or kind != "config" else 2, 2)
    with pytest.raises(RankMismatchError) as caught:
        zlaunch.initialize(model=model, config=settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("depth", "layers.2"),
        ("shape", "layers.1.up.weight has shape [50, 24]"),
        ("config", "a different config"),
    ],
)
def test_ranks_that_differ_are_named(kind: str, text: str) -> None:
    for message in run_workers(_mismatch, 2, kind):
        assert text in message and "rank 1" in message


def _no_sync(stage: int) -> None:
    rank = join()
    engine, *_ = zlaunch.initialize(model=net().double(), config=config(stage, 2))
    if stage >= 2:
        with pytest.raises(RuntimeError, match="no_sync"), engine.no_sync():
            pass
        return
    data = batches(2, 4)
    with engine.no_sync():
        with engine.no_sync():
            pass
        engine.backward(loss_of(engine, data[0].chunk(2)[rank]))
    assert not engine.comm.moved.keys() & {"all_gather", "reduce_scatter", "all_reduce"}
    engine.backward(loss_of(engine, data[1].chunk(2)[rank]))
    engine.step()
    reference, *_ = zlaunch.initialize(model=net().double(), config=config(0, 2))
    (loss_of(reference, data[0].chunk(2)[rank]) + loss_of(reference, data[1].chunk(2)[rank])).backward()
    reference.step()
    for a, b in zip(engine.module.state_dict().values(), reference.module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_sync(stage: int) -> None:
    run_workers(_no_sync, 2, stage)


def _last_pass_without_reduction(stage: int, synced: tuple[bool, bool]) -> list[torch.Tensor]:
    zlaunch.init_distributed()
    rank = torch.distributed.get_rank()
    engine, *_ = zlaunch.initialize(model=net().double(), config=config(stage, 2))
    for batch, sync in zip(batches(2, 4), synced, strict=True):
        with contextlib.nullcontext() if sync else engine.no_sync():
            engine.backward(loss_of(engine, batch.chunk(2)[rank]))
    engine.step()
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_after_no_sync_has_all_gradients(stage: int) -> None:
    expected, _ = run_workers(_last_pass_without_reduction, 2, stage, (True, True))
    for synced in ((True, False), (False, False)):
        for parameters in run_workers(_last_pass_without_reduction, 2, stage, synced):
            for a, b in zip(parameters, expected, strict=True):
                torch.testing.assert_close(a, b)


def _poison(steps: int) -> list[float]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 2))
    losses = train_engine(engine, batches(steps, 4))
    assert all(unit.full.isnan().all() for unit in engine.units if unit.shard_params)
    return losses


def test_poisoned_memory_is_never_used() -> None:
    for losses in run_workers(_poison, 2, 5, env={"ZLAUNCH_DEBUG_FREE": "poison"}):
        assert all(loss == loss and loss < 10 for loss in losses)


def _loader() -> tuple[int, list[int]]:
    zlaunch.init_distributed()
    data = torch.utils.data.TensorDataset(torch.arange(10))
    _, _, loader, _ = zlaunch.initialize(model=net(), config=config(1, 2), training_data=data)
    assert loader is not None
    epochs = [[int(x) for (batch,) in loader for x in batch] for _ in range(2)]
    assert sorted(epochs[0]) != epochs[0] or sorted(epochs[1]) != epochs[1]
    assert epochs[0] != epochs[1]
    return len(loader), epochs[0]


def test_training_data_is_shared_between_ranks() -> None:
    (length, first), (_, second) = run_workers(_loader, 2)
    assert length == 3
    assert sorted({*first, *second}) == list(range(10))
