"""Test checkpoints: saved under any setting, loaded under any other, to the bit; training goes on."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Net, batches, config, loss_of, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.checkpoint.format.manifest import VALUE, Checkpoint
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

TILES = {"sub_group_size": 4096}


class Rich(nn.Module):
    """Everything that makes a checkpoint interesting: tied and frozen parameters, one that is used in odd
    steps only and one never, buffers, an integer parameter.
    """

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(width=48, tied=True)
        self.frozen = nn.Linear(31, 31).requires_grad_(False)
        self.sometimes = nn.Linear(31, 31)
        self.never = nn.Linear(200, 31)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.frozen(self.net(tokens))
        if self.training:
            self.count += 1
        return self.sometimes(y) if int(self.count) % 2 else y


def rich() -> Rich:
    torch.manual_seed(5)
    return Rich()


def settings(name: str, world: int, scratch: str) -> dict[str, Any]:
    """The config of a setting such as ``stage3 nvme``."""
    stage, _, how = name.partition(" ")
    group, _, how = how.partition(" with ") if " with " in how else ("", "", how)
    nvme = {"device": "nvme", "nvme_path": scratch}
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 9000, **TILES}
    extra: dict[str, Any] = {}
    if group:
        zero |= {"shard_group": 2} if group == "groups" else {"zero_hpz_partition_size": 2}
    if how == "cpu":
        zero |= {"offload_optimizer": {"device": "cpu"}}
    elif how == "half":
        zero |= {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    elif how == "nvme":
        zero |= {"offload_optimizer": nvme}
    elif how == "all on disk":
        zero |= {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 2000}}
    elif how == "all in host":
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    elif how == "large units":
        zero |= {"reduce_bucket_size": 10**7, "stage3_module_granularity_threshold": 30000}
    elif how:
        extra[how] = {"enabled": True, **({"initial_scale_power": 8} if how == "fp16" else {})}
    return config(int(stage[-1]), 12 // world, zero=zero, **extra)


GRID: dict[int, list[str]] = {
    1: ["stage0", "stage3 nvme", "stage1 bf16"],
    2: [
        *("stage0", "stage1", "stage2 cpu"),
        *("stage3", "stage3 all on disk", "stage3 fp16"),
    ],
    3: ["stage3", "stage2 nvme"],
    4: [
        *("stage1 groups with bf16", "stage3 groups with all in host"),
        *("stage2 copies with large units", "stage3 copies with fp16", "stage3 copies with all on disk"),
    ],
}


def content(folder: str | Path) -> dict[str, Any]:
    """Everything that a checkpoint has of each parameter, as plain tensors."""
    checkpoint = Checkpoint(folder)
    found: dict[str, Any] = {}
    for name, entry in checkpoint.parameters.items():
        for kind in (VALUE, *entry["state"]["tensors"]):
            flat = torch.full((torch.Size(entry["shape"]).numel(),), torch.nan, dtype=torch.float64)
            checkpoint.read_into(flat, name, kind)
            found[f"{name}/{kind}"] = flat
        found[f"{name}/scalars"] = entry["state"]["scalars"]
    for name in checkpoint.manifest["buffers"]:
        found[name] = checkpoint.file("whole.safetensors").read_whole(f"buffer.{name}")
    found["counters"] = checkpoint.manifest["engine"]
    checkpoint.close()
    return found


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of entries that are not the same in every bit."""
    names = sorted(left.keys() ^ right.keys())
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
        if not same:
            names.append(name)
    return names


def engine_of(name: str, scratch: str, exact: bool = False) -> Any:
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    return zlaunch.initialize(
        model=rich().double() if exact else rich(), config=settings(name, world, scratch)
    )[0]


def _save(names: list[str], folder: str, scratch: str) -> list[str]:
    """Train and save under each setting; what the files do not say rightly."""
    problems: list[str] = []
    world = os.environ["WORLD_SIZE"]
    for name in names:
        engine = engine_of(name, scratch)
        train_engine(engine, batches(3, 12))
        engine.save_checkpoint(folder, tag=f"{name} of {world}")
        values = {key: value.cpu().clone() for key, value in engine.module.state_dict().items()}
        saved = content(Path(folder, f"{name} of {world}"))
        for key, value in values.items():
            if key == "net.head.weight":  # tied
                continue
            own = saved[f"{key}/{VALUE}"].view(value.shape) if f"{key}/{VALUE}" in saved else saved[key]
            if not torch.equal(own.to(value.dtype), value):
                problems.append(f"{name}: {key}")
        scalars = saved["sometimes.weight/scalars"]["step"][1], saved["net.norm.weight/scalars"]["step"][1]
        if scalars != (2.0, 3.0) or saved["never.weight/scalars"]:
            problems.append(f"{name}: steps {scalars}")
        engine.destroy()
    return problems


def _reshard(names: list[str], folder: str, scratch: str) -> list[str]:
    """Load every checkpoint under each setting and save it again; what has changed by that."""
    problems: list[str] = []
    sources = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    world = os.environ["WORLD_SIZE"]
    for name in names:
        engine = engine_of(name, scratch)
        train_engine(engine, batches(1, 12))  # something that must not stay
        for source in sources:
            path, _ = engine.load_checkpoint(folder, tag=source)
            assert path == str(Path(folder, source))
            again = Path(f"{folder}-again")
            engine.save_checkpoint(again, tag="x")
            if engine.global_rank == 0:
                was = content(Path(folder, source))
                for key in was:
                    if key.startswith("frozen") and key.endswith(VALUE):  # has no master
                        was[key] = was[key].to(engine.module.frozen.weight.dtype).float()
                found = differences(was, content(again / "x"))
                problems += [f"{source} -> {name} of {world}: {key}" for key in found]
            values = engine.module.state_dict()
            saved = content(again / "x")
            for key, value in values.items():
                own = saved.get(f"{key}/{VALUE}")
                if own is not None and not torch.equal(own.to(value.dtype).view(value.shape), value.cpu()):
                    problems.append(f"{source} -> {name} of {world}: values of {key}")
        losses = train_engine(engine, batches(1, 12))
        assert all(loss == loss for loss in losses)
        engine.destroy()
    return problems


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "grid",
    [
        {
            1: ["stage3 nvme"],
            2: ["stage1"],
            4: ["stage3 copies with all on disk"],
        },
        pytest.param(GRID, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_every_setting_loads_what_every_other_has_saved(tmp_path: Path, grid: dict[int, list[str]]) -> None:
    """Masters, moments, steps and buffers, bit for bit; stages, worlds, offload, precision, unit layout."""
    folder, scratch = str(tmp_path / "saved"), str(tmp_path / "scratch")
    for world, names in grid.items():
        for problems in run_workers(_save, world, names, folder, scratch):
            assert problems == []
    assert len([path for path in Path(folder).iterdir() if path.is_dir()]) == sum(map(len, grid.values()))
    for world, names in grid.items():
        for problems in run_workers(_reshard, world, names, folder, scratch):
            assert problems == []


def _memory_of_the_optimizer(folder: str) -> bool:
    """The files against the optimizer's own state, where one rank has all of it in one piece."""
    zlaunch.init_distributed()
    model = rich().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    engine, *_ = zlaunch.initialize(model=model, config=settings("stage0", 1, ""), optimizer=optimizer)
    train_engine(engine, batches(3, 12))
    engine.save_checkpoint(folder, "a")
    plain = rich().double()
    own = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=3e-3)
    for batch in batches(3, 12):
        loss_of(plain, batch).backward()
        own.step()
        own.zero_grad()
    saved = content(Path(folder, "a"))
    same = []
    for name, parameter in plain.named_parameters():
        for key, value in own.state.get(parameter, {}).items():
            if key == "step":
                same.append(saved[f"{name}/scalars"]["step"] == ["F32", float(value)])
            else:
                same.append(torch.allclose(saved[f"{name}/{key}"].view(value.shape), value, 1e-9, 1e-12))
    return len(same) > 60 and all(same)


def test_the_files_say_what_plain_torch_would_have(tmp_path: Path) -> None:
    assert run_workers(_memory_of_the_optimizer, 1, str(tmp_path)) == [True]


# -- training goes on


def _noisy(model: nn.Module, tokens: Tensor) -> Tensor:
    """A loss that draws random numbers."""
    return loss_of(model, tokens) * (1 + 0.1 * torch.rand(()))


def _run(name: str, folder: str, scratch: str, first: int, last: int, total: int = 20) -> list[float]:
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_max_lr": 3e-3}}
    given = {**settings(name, world, scratch), "scheduler": schedule}
    torch.manual_seed(torch.distributed.get_rank())
    engine, *_ = zlaunch.initialize(model=rich(), config=given)
    if first:
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client == {"note": ("a", 1.5)}
        assert engine.global_steps == first
    losses = train_engine(engine, batches(total, 12)[first:last], _noisy)
    if last < total:
        engine.save_checkpoint(folder, client_state={"note": ("a", 1.5)})
    engine.destroy()
    return losses


EXACT = [(1, "stage2 half"), (2, "stage1 nvme"), (2, "stage3")]
MORE = [(1, "stage0"), *((2, name) for name in ("stage0", "stage2 cpu", "stage2 fp16", "stage3 bf16"))]
MORE.append((2, "stage3 all on disk"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "name"), [*EXACT, *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in MORE)]
)
def test_ten_and_ten_steps_are_twenty(tmp_path: Path, world: int, name: str) -> None:
    """In new processes, with dropout-like noise, a schedule, a parameter that is used now and then."""
    folder = str(tmp_path / name)
    straight = run_workers(_run, world, name, folder, str(tmp_path), 0, 20)
    begun = run_workers(_run, world, name, folder, str(tmp_path), 0, 10)
    ended = run_workers(_run, world, name, folder, str(tmp_path), 10, 20)
    assert [a + b for a, b in zip(begun, ended, strict=True)] == straight


def _losses(name: str, folder: str, scratch: str, first: int, last: int) -> list[float]:
    """Means over the ranks, in double precision."""
    engine = engine_of(name, scratch, exact=True)
    if first:
        engine.load_checkpoint(folder)
    losses = torch.tensor(train_engine(engine, batches(20, 12)[first:last]), dtype=torch.float64)
    if last < 20:
        engine.save_checkpoint(folder)
    torch.distributed.all_reduce(losses)
    world = engine.world_size
    engine.destroy()
    return (losses / world).tolist()


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_going_on_with_another_world_size(tmp_path: Path) -> None:
    (straight,) = run_workers(_losses, 1, "stage0", "", "", 0, 20)
    for index, (world, name, other, then) in enumerate(
        [(2, "stage3", 1, "stage1"), (1, "stage0", 3, "stage3"), (3, "stage2", 2, "stage2 nvme")]
    ):
        folder = str(tmp_path / str(index))
        begun = run_workers(_losses, world, name, folder, str(tmp_path), 0, 10)[0]
        ended = run_workers(_losses, other, then, folder, str(tmp_path), 10, 20)[0]
        assert begun + ended == pytest.approx(straight, rel=1e-9), (world, name, other, then)


def _positions(folder: str) -> list[Any]:
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    data = torch.utils.data.TensorDataset(torch.arange(50))

    def loader() -> Any:
        engine, _, loader, _ = zlaunch.initialize(
            model=nn.Linear(2, 2), config=config(1, 4 // world), training_data=data
        )
        return engine, loader

    engine, straight = loader()
    whole = [[batch[0].tolist() for batch in straight] for _ in range(3)]
    torch.manual_seed(0)
    before = torch.rand(1)
    engine, first = loader()
    begun = [batch[0].tolist() for batch in first]
    for batch in first:
        begun.append(batch[0].tolist())
        if len(begun) == len(whole[0]) + 5:
            break
    torch.manual_seed(0)
    engine.save_checkpoint(folder)
    engine, then = loader()
    engine.load_checkpoint(folder)
    rest = [batch[0].tolist() for batch in then]
    drawn = torch.rand(1)  # reading data draws nothing from the model's generator
    last = [batch[0].tolist() for batch in then]
    return [
        begun + rest + last == [batch for epoch in whole for batch in epoch],
        bool(before == drawn),
        whole,
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_the_loader_goes_on_behind_the_last_batch(tmp_path: Path, world: int) -> None:
    for goes_on, undisturbed, _ in run_workers(_positions, world, str(tmp_path)):
        assert goes_on and undisturbed


def _position_elsewhere(folder: str, load: bool) -> list[int]:
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    data = torch.utils.data.TensorDataset(torch.arange(48))
    engine, _, loader, _ = zlaunch.initialize(
        model=nn.Linear(2, 2), config=config(1, 12 // world), training_data=data
    )
    assert loader is not None
    if load:
        engine.load_checkpoint(folder)
        return [int(i) for batch in loader for i in batch[0]]
    seen = [int(i) for batch in [next(iter(loader))] for i in batch[0]]
    engine.save_checkpoint(folder)
    return seen


def test_the_loader_goes_on_with_another_world_size(tmp_path: Path) -> None:
    seen = [i for part in run_workers(_position_elsewhere, 2, str(tmp_path), False) for i in part]
    rest = [i for part in run_workers(_position_elsewhere, 3, str(tmp_path), True) for i in part]
    assert len(seen) == 12 and sorted(seen + rest) == list(range(48))


# -- what a user may do wrong


def _mistakes(folder: str) -> dict[str, str]:
    zlaunch.init_distributed()
    messages: dict[str, str] = {}

    def catch(key: str, action: Any) -> None:
        try:
            action()
        except CheckpointError as error:
            messages[key] = str(error)

    engine = engine_of("stage2", "")
    rank = engine.global_rank
    assert engine.load_checkpoint(folder, missing_ok=True) == (None, {})
    assert engine.load_checkpoint(None) == (None, {})
    train_engine(engine, batches(1, 12))

    class Thing:
        pass

    catch("object", lambda: engine.save_checkpoint(folder, client_state={"a": [1, {"b": Thing()}]}))
    catch("one rank", lambda: engine.save_checkpoint(folder, client_state={"a": Thing() if rank else 1}))
    catch("no dict", lambda: engine.save_checkpoint(folder, client_state=[1]))
    catch("slash", lambda: engine.save_checkpoint(folder, tag="a/b"))
    catch("file", lambda: engine.save_checkpoint(__file__))
    assert not Path(folder).exists() or not [p for p in Path(folder).rglob("*") if p.is_file()]
    engine.save_checkpoint(folder)
    catch("no tag", lambda: engine.load_checkpoint(folder, tag="global_step7"))
    engine.destroy()

    def other(model: nn.Module, **options: Any) -> Any:
        given = settings("stage1", 2, "") | options
        return zlaunch.initialize(model=model, config=given)[0]

    smaller = rich()
    del smaller.never
    smaller.more = nn.Linear(3, 3)
    engine = other(smaller)
    catch("names", lambda: engine.load_checkpoint(folder))
    engine.load_checkpoint(folder, load_module_strict=False)
    train_engine(engine, batches(1, 12))
    engine.destroy()
    wide = rich()
    wide.never = nn.Linear(7, 31)
    engine = other(wide)
    catch("shape", lambda: engine.load_checkpoint(folder, load_module_strict=False))
    engine.destroy()
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine = other(rich(), optimizer=sgd)
    catch("optimizer", lambda: engine.load_checkpoint(folder))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.global_steps == 1
    engine.load_checkpoint(folder, load_module_only=True)
    train_engine(engine, batches(1, 12))
    engine.destroy()
    amsgrad = {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}}
    engine = other(rich(), optimizer=amsgrad)
    catch("amsgrad", lambda: engine.load_checkpoint(folder))
    engine.destroy()
    l2 = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}
    engine = other(rich(), optimizer=l2)
    engine.load_checkpoint(folder)
    kept = engine.optimizer.param_groups[0].get("decoupled_weight_decay")  # torch 2.6 has no such entry
    assert not kept, "it is the class's"
    train_engine(engine, batches(1, 12))
    engine.destroy()
    return messages


def test_mistakes_have_one_clear_message_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, second = run_workers(_mistakes, 2, str(folder))
    assert first == second
    expected = {
        "object": f"client_state['a'][1]['b'] is a {__name__}._mistakes.<locals>.Thing",
        "one rank": "client_state['a'] is a",
        "no dict": "client_state is a list: it has to be a dict",
        "slash": "tag 'a/b': must be a plain folder name",
        "file": f"{Path(__file__).name}: File exists",
        "no tag": "has no checkpoint 'global_step7'; 'global_step1' looks whole: use it, or tag=\"auto\"",
        "names": "does not match the model: more.weight is not in the checkpoint; more.bias is not in",
        "shape": "never.weight has shape [31, 200] in the checkpoint and [31, 7] in the model",
        "amsgrad": "was saved with amsgrad False, but the optimizer has True",
        "optimizer": "has the state of AdamW, but the optimizer is SGD: pass load_optimizer_states=False",
    }
    assert first.keys() == expected.keys()
    for key, text in expected.items():
        assert text in first[key], first[key]


def _own_folders(folder: str) -> tuple[str, list[float]]:
    """Save to a folder of each rank's own; return what was said, and losses from the state of rank 0's."""
    rank = join()
    engine, *_ = zlaunch.initialize(model=Net(), config=config(3, 6))
    train_engine(engine, batches(1, 12))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine.save_checkpoint(f"{folder}/{rank}")
    wanted = train_engine(engine, batches(2, 12))
    engine.load_checkpoint(f"{folder}/0")
    assert train_engine(engine, batches(2, 12)) == wanted
    return said.getvalue(), wanted


def test_folders_of_each_ranks_own_become_rank_0s(tmp_path: Path) -> None:
    (said, _), _ = run_workers(_own_folders, 2, str(tmp_path))
    assert f"warning: save_checkpoint: rank 1 saves to {tmp_path}/1, but rank 0 to {tmp_path}/0: all" in said
    assert [each.name for each in tmp_path.iterdir()] == ["0"]


def _own_state(folder: str, save: bool) -> Any:
    engine = engine_of("stage1", "")
    generator = torch.Generator().manual_seed(engine.global_rank)
    if save:
        engine.save_checkpoint(folder, client_state={"g": generator.get_state(), "common": torch.ones(2)})
        engine.save_checkpoint(folder, tag="same", client_state={"common": torch.ones(2)}, save_latest=False)
        return int(torch.randint(1 << 40, (), generator=generator))
    _, client = engine.load_checkpoint(folder)
    generator.set_state(client["g"])
    assert torch.equal(client["common"], torch.ones(2))
    return int(torch.randint(1 << 40, (), generator=generator))


def test_each_rank_gets_its_own_client_state_back(tmp_path: Path) -> None:
    drawn = run_workers(_own_state, 2, str(tmp_path), True)
    assert drawn[0] != drawn[1]
    assert run_workers(_own_state, 2, str(tmp_path), False) == drawn
    assert run_workers(_own_state, 3, str(tmp_path), False) == [drawn[0]] * 3
    states = Checkpoint(tmp_path / "same").manifest["rank_states"]
    assert all("client_state" not in state for state in states)


def _frozen_left_out(folder: str) -> list[bool]:
    engine = engine_of("stage3", "")
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    names = set(Checkpoint(Path(folder, "global_step0")).parameters)
    other = rich()
    with torch.no_grad():
        other.frozen.weight.fill_(2)
        other.sometimes.weight.fill_(2)
    engine.destroy()
    engine, *_ = zlaunch.initialize(model=other, config=settings("stage2", 2, ""))
    engine.load_checkpoint(folder)
    state = engine.module.state_dict()
    kept = bool((state["frozen.weight"] == 2).all())
    return [
        "frozen.weight" not in names,
        kept,
        torch.equal(state["sometimes.weight"], rich().sometimes.weight),
    ]


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    assert run_workers(_frozen_left_out, 2, str(tmp_path)) == [[True] * 3] * 2


def _nodes(folder: str) -> Any:
    """Two ranks that take themselves for two nodes, each with a disk of its own."""
    zlaunch.init_distributed()
    os.environ["LOCAL_RANK"] = "0"
    rank = torch.distributed.get_rank()
    import socket

    socket.gethostname = lambda: f"node{rank}"
    messages = []
    for name in ("stage1", "stage0", "stage3 nvme"):
        given = {
            **settings(name, 2, folder),
            "checkpoint": {"use_node_local_storage": True},
        }
        engine, *_ = zlaunch.initialize(model=rich(), config=given)
        train_engine(engine, batches(2, 12))
        own = f"{folder}/{name}-{rank}"
        engine.save_checkpoint(own, client_state={"mine": torch.full((3,), float(rank))})
        before = {key: value.clone() for key, value in engine.module.state_dict().items()}
        train_engine(engine, batches(1, 12))
        _, client_state = engine.load_checkpoint(own)
        after = engine.module.state_dict()
        messages.append(all(torch.equal(after[key], before[key]) for key in before))
        messages.append(client_state["mine"].tolist() == [rank] * 3)
        engine.destroy()
    return messages


def _alone(folder: str) -> str:
    engine = engine_of("stage2", "")
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    return str(caught.value)


@pytest.mark.rotated
def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    assert run_workers(_nodes, 2, str(tmp_path)) == [[True] * 6] * 2
    for rank in (0, 1):
        folder = tmp_path / f"stage1-{rank}" / "global_step2"
        own = {path.name for path in folder.iterdir()}
        assert own == {"manifest.json", "whole.safetensors", f"rank_{rank:05d}.safetensors"}
    (message,) = run_workers(_alone, 1, str(tmp_path / "stage1-0"))
    assert "some files are on node1" in message and "merge their folders" in message
    # together they are a checkpoint like any other
    for file in (tmp_path / "stage1-1" / "global_step2").glob("rank*"):
        shutil.copy(file, tmp_path / "stage1-0" / "global_step2")
    Checkpoint(tmp_path / "stage1-0" / "global_step2").verify()
    assert run_workers(_losses, 1, "stage2", str(tmp_path / "stage1-0"), "", 2, 20)
