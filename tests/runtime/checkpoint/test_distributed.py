"""Test checkpoints of torch.distributed.checkpoint, which torch itself writes and reads here."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign
from zlaunch.runtime.checkpoint.export.consolidate import export_distributed
from zlaunch.runtime.checkpoint.format.manifest import Checkpoint
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

FULLY_SHARD_RUNS_ON_CPU = torch.__version__ >= torch.torch_version.TorchVersion("2.7")
CONFIG: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0.0}


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def _batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = model(_batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _rows(value: Any, mesh: DeviceMesh) -> Any:
    """Return a tensor as a DTensor of this rank's rows; a number and what is no tensor as it is."""
    return (
        distribute_tensor(value.detach(), mesh, [Shard(0)])
        if isinstance(value, Tensor) and value.dim()
        else value
    )


def _save(folder: str, flat: bool, sharded: bool) -> list[float]:
    """Train, save, and return the losses that follow."""
    join()
    model = _model()
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        if FULLY_SHARD_RUNS_ON_CPU:
            fully_shard(model, mesh=mesh)
    optimizer = _optimizer(model)
    _steps(model, optimizer, 0, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    own, states = get_state_dict(model, optimizer, options=options)
    if sharded and not FULLY_SHARD_RUNS_ON_CPU:  # each rank trained the whole: only its rows are written
        learnt = {name for name, _ in model.named_parameters()}
        own = {name: _rows(value, mesh) if name in learnt else value for name, value in own.items()}
        states = tree_map(lambda value: _rows(value, mesh), states)
    save({"model": own, "optim": states, "epoch": 3}, checkpoint_id=folder)
    return _steps(model, optimizer, 3, 6)


def _go_on(folder: str, stage: int) -> list[float]:
    join()
    model = _model()
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 4}
    config["train_batch_size"] = 4 * torch.distributed.get_world_size()
    engine, *_ = zlaunch.initialize(model=model, optimizer=_optimizer(model), config=config)
    engine.load_checkpoint(folder)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.02]
    losses = []
    for step in range(3, 6):
        loss = engine(_batch(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flat", "sharded", "world", "stage"),
    [(False, False, 1, 3), (True, False, 2, 2), (False, True, 2, 3), (True, True, 1, 1)],
    ids=str,
)
def test_training_goes_on_where_torch_stopped(
    tmp_path: Path, flat: bool, sharded: bool, world: int, stage: int
) -> None:
    wanted = run_workers(_save, 2 if sharded else 1, str(tmp_path / "dcp"), flat, sharded)[0]
    found = read_foreign(tmp_path / "dcp")
    assert found.left_out == ("epoch",) and found.buffers.keys() == {"2.num_batches_tracked"}
    write_foreign(found, tmp_path / "ours")
    for losses in run_workers(_go_on, world, str(tmp_path / "ours"), stage):
        assert losses == pytest.approx(wanted, rel=1e-4)


def _ours(folder: str) -> list[float]:
    join()
    model = _model()
    config = {**CONFIG, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = zlaunch.initialize(model=model.eval(), optimizer=_optimizer(model), config=config)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(6):
        if step == 3:
            engine.save_checkpoint(folder)
        loss = engine(_batch(step).chunk(2)[rank]).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    return losses[3:]


def test_torch_goes_on_where_we_stopped(tmp_path: Path) -> None:
    wanted = run_workers(_ours, 2, str(tmp_path / "ours"))[0]
    opened = Checkpoint(next(path for path in (tmp_path / "ours").iterdir() if path.is_dir()))
    written = export_distributed(opened, tmp_path / "dcp")
    assert {path.name for path in written} == {
        ".metadata",
        *(p.name for p in written if p.suffix == ".distcp"),
    }
    assert sorted(os.listdir(tmp_path / "dcp")) == sorted(path.name for path in written)
    model = _model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = _optimizer(model)
    own, states = get_state_dict(model, optimizer)
    saved = {"model": own, "optim": states}
    load(saved, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)
    assert _steps(model, optimizer, 3, 6) == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(CheckpointError, match=r"already has a torch checkpoint"):
        export_distributed(opened, tmp_path / "dcp")


def test_code_is_not_run_and_damage_is_named(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/run",)

    model = _model()
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "a")
    for name, content, said in (
        (".metadata", pickle.dumps(Evil()), "can run code, so zlaunch does not load it .*system"),
        (".metadata", b"rubbish", "is not a file of torch"),
        (".metadata", b"\x80\x04Nr\xff\xff\xff\xff.", "is not a file of torch"),  # asks for too much memory
        ("__0_0.distcp", _torch_file(Evil()), "contains pickled objects|cannot be read"),
        ("__0_0.distcp", b"", "cannot be read by torch"),
    ):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b" / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            write_foreign(read_foreign(tmp_path / "b"), tmp_path / "out")
    changed = bytearray((tmp_path / "a" / "__0_0.distcp").read_bytes())
    changed[changed.find(next(iter(model.state_dict().values())).numpy().tobytes()) + 2] ^= 64
    (tmp_path / "b" / "__0_0.distcp").write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: .*it is damaged: Bad CRC-32"):
        write_foreign(read_foreign(tmp_path / "b"), tmp_path / "out")
    (tmp_path / "b" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read by torch: .*No such file"):
        read_foreign(tmp_path / "b")
    assert not (tmp_path / "run").exists() and not (tmp_path / "out" / "imported").exists()


class _Attribute:
    def __init__(self, *given: Any) -> None:
        self._given = given

    def __reduce__(self) -> Any:
        return getattr, self._given


def test_members_of_enums_may_be_pickled_as_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2 does it, and no other attribute is looked up."""
    metadata: Any = torch.distributed.checkpoint.metadata
    by_name = property(lambda member: lambda protocol: (getattr, (type(member), member.name)))
    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    save({"model": _model().state_dict()}, checkpoint_id=tmp_path)
    written = (tmp_path / ".metadata").read_bytes()
    assert b"getattr" in written
    read_foreign(tmp_path)
    for given in (
        (torch.Size, "numel"),
        (metadata._MEM_FORMAT_ENCODING, "__init__"),
        (torch.float32, "to_real"),
    ):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(_Attribute(*given)))
        with pytest.raises(CheckpointError, match=r"builtins\.getattr|is not a file of torch"):
            read_foreign(tmp_path)


class _Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.one, self.other = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(words))
        return found


def _loads(folder: str, tied: bool) -> dict[str, Tensor]:
    join()
    model = _Tied(tied)
    config = {**CONFIG, "train_batch_size": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = zlaunch.initialize(model=model, config=config)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_tied_weights_are_found(tmp_path: Path, with_optimizer: bool) -> None:
    model = _Tied(True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)[1]
    own = model.state_dict()
    save({"model": own, **({"optim": states} if with_optimizer else {})}, checkpoint_id=tmp_path / "dcp")
    found = read_foreign(tmp_path / "dcp")
    assert found.tied == {"head.weight": "words.weight"}
    assert found.parameters.keys() == {"words.weight", "one", "other"}
    write_foreign(found, tmp_path / "ours")
    for tied in (True, False):
        (loaded,) = run_workers(_loads, 1, str(tmp_path / "ours"), tied)
        assert all(torch.equal(loaded[name], value) for name, value in own.items())


def _torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue() * 9


def test_what_is_not_clear_is_refused(tmp_path: Path) -> None:
    model = _model()
    optimizer = _optimizer(model)
    _steps(model, optimizer, 0, 1)
    own = model.state_dict()
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"model": own, "optim": optimizer.state_dict()},
            "has state of '0', which is not in the model",
        ),
        ({"one": own, "two": own}, r"several state dicts \(one, two\)"),
        ({"epoch": 3}, "contains no model tensors"),
    ]
    for number, (saved, said) in enumerate(cases):
        save(saved, checkpoint_id=tmp_path / str(number))
        with pytest.raises(CheckpointError, match=said):
            read_foreign(tmp_path / str(number))
    for name, saved in (("plain", own), ("wrapped", {f"module.{key}": value for key, value in own.items()})):
        save(dict(saved), checkpoint_id=tmp_path / name)
        found = read_foreign(tmp_path / name)
        assert found.parameters.keys() | found.buffers.keys() == own.keys() and not found.left_out


def _cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)


SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler": _cosine},
    {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 4}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 2}}},
]


def _rates(folder: str | None, schedule: dict[str, Any], **options: Any) -> list[float]:
    """Return the learning rates of three steps, and save."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config |= {key: value for key, value in schedule.items() if key == "scheduler"}
    made = schedule.get("lr_scheduler")
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config, lr_scheduler=made)
    engine.load_checkpoint(folder, **options)
    rates = []
    for _ in range(3):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    if folder is not None:
        engine.save_checkpoint(folder)
    engine.destroy()
    return rates


def _rates_after_an_import(folder: str) -> list[tuple[list[float], list[float], list[float]]]:
    zlaunch.init_distributed()
    found = []
    for index, (schedule, old) in enumerate(zip(SCHEDULES, (0.0, 5e-4, 0.0), strict=True)):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2, eta_min=old)
        for _ in range(2):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        states = get_state_dict(model, optimizer)
        there, here = f"{folder}/old-{index}", f"{folder}/{index}"
        save({"model": states[0], "optim": states[1]}, checkpoint_id=there)
        write_foreign(read_foreign(there), here)
        started = _rates(here, schedule)
        restarted = _rates(here, schedule, load_lr_scheduler_states=False)
        found.append((_rates(None, schedule), started, restarted))
    return found


def test_a_schedule_without_state_to_load_starts_from_the_configured_rate(tmp_path: Path) -> None:
    (found,) = run_workers(_rates_after_an_import, 1, str(tmp_path))
    for expected, started, restarted in found:
        assert max(expected) > 5e-4 and started == expected and restarted == expected
