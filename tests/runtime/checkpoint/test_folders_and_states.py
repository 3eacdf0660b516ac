"""Test what a checkpoint must not do to other files, and the odd states that it has to bring back."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zlaunch
from tests.limits import LIMIT_S
from tests.runtime.checkpoint.test_save_load import differences
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.checkpoint.export.full_weights import export, get_fp32_state_dict_from_zero_checkpoint
from zlaunch.runtime.checkpoint.format.commit import put_in_place
from zlaunch.runtime.checkpoint.format.manifest import MANIFEST, Checkpoint, find
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError
from zlaunch.runtime.checkpoint.save import Save


def engine_of(
    model: nn.Module | None = None, optimizer: Any = None, scheduler: Any = None, **options: Any
) -> Any:
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    given = config(options.pop("stage", 1), 12 // world, **options)
    return zlaunch.initialize(
        model=model if model is not None else net(), config=given, optimizer=optimizer, lr_scheduler=scheduler
    )[0]


def step(engine: Any, count: int = 1) -> None:
    train_engine(engine, batches(count, 12))


def _masters(model: nn.Module) -> list[Tensor]:
    found = [zlaunch.safe_get_full_fp32_param(parameter) for parameter in model.parameters()]
    return [master for master in found if master is not None]


def _rounded(folder: str) -> list[bool]:
    """Master weights after a load, with load_from_fp32_weights false and true: rounded, and as saved."""
    found = []
    for stage, device in ((0, None), (1, None), (2, "cpu"), (3, None), (3, "nvme")):
        for exact in (False, True):
            zero: dict[str, Any] = {"load_from_fp32_weights": exact}
            if device is not None:
                zero["offload_optimizer"] = {"device": device, "nvme_path": folder}
            model = net()
            engine = engine_of(model, stage=stage, zero=zero, bf16={"enabled": True})
            step(engine, 2)
            engine.save_checkpoint(folder, tag="saved")
            masters = _masters(model)
            step(engine)
            engine.load_checkpoint(folder, tag="saved")
            wanted = [master if exact else master.bfloat16().float() for master in masters]
            found.append(all(map(torch.equal, _masters(model), wanted)))
            assert exact or not all(map(torch.equal, wanted, masters))
            step(engine)
            engine.destroy()
    return found


@pytest.mark.rotated
def test_masters_are_rounded_by_a_load_that_asks_for_the_weights_in_16_bits(tmp_path: Path) -> None:
    assert run_workers(_rounded, 2, str(tmp_path)) == [[True] * 10] * 2


def _spares(folder: str) -> list[str]:
    """Pruning and cleaning, among things that are somebody else's."""
    root = Path(folder)
    for name in ("dataset/manifest.json", "dataset/data.bin", ".mydata.tmp/x", ".photos.deleted/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
        os.utime((root / name).parent, (1, 1))
        os.utime(root / name, (1, 1))
    engine = engine_of(checkpoint={"keep_last": 2})
    engine.save_checkpoint(root, tag="best", save_latest=False)
    for _ in range(4):
        step(engine)
        engine.save_checkpoint(root)
        if engine.global_steps == 2:
            (root / "global_step2" / "notes.txt").write_text("mine")
    (root / "mine").mkdir()
    (root / "mine" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="mine: exists and is not a checkpoint"):
        engine.save_checkpoint(root, tag="mine")
    (root / "best" / "tokenizer.json").write_text("{}")
    engine.save_checkpoint(root, tag="best")
    for tag in (" x", "latest", "auto", ".x", "a\0b", ""):
        with pytest.raises(CheckpointError, match="must be a plain folder name"):
            engine.save_checkpoint(root, tag=tag)
    assert (root / "best" / "tokenizer.json").exists() and Checkpoint(root / "best").verify()
    return sorted(str(path.relative_to(root)) for path in root.glob("*"))


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (found,) = run_workers(_spares, 1, str(tmp_path))
    kept = ["global_step2", "global_step3", "global_step4"]  # the second for somebody's notes
    assert found == sorted(
        [".mydata.tmp", ".photos.deleted", "best", "dataset", *kept, "latest", "mine", "zero_to_fp32.py"]
    )
    assert [path.name for path in (tmp_path / "global_step2").iterdir()] == ["notes.txt"]
    assert (tmp_path / "dataset" / "data.bin").exists()


def _mixed(folder: str) -> tuple[str, str]:
    """Two nodes of which one has lost the newest save of a tag."""
    zlaunch.init_distributed()
    rank = torch.distributed.get_rank()
    os.environ["LOCAL_RANK"] = "0"
    own = Path(folder, str(rank))
    engine = engine_of(checkpoint={"use_node_local_storage": True})
    engine.save_checkpoint(own, tag="earlier")
    step(engine)
    engine.save_checkpoint(own, tag="last")
    if rank == 1:
        shutil.copytree(own / "last", own / "kept")
    step(engine)
    engine.save_checkpoint(own, tag="last")
    if rank == 1:
        shutil.rmtree(own / "last")
        os.rename(own / "kept", own / "last")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(own)
    path, _ = engine.load_checkpoint(own, tag="auto")
    return str(caught.value), Path(path).name


def test_two_saves_of_a_tag_are_never_mixed(tmp_path: Path) -> None:
    for message, taken in run_workers(_mixed, 2, str(tmp_path)):
        assert "rank 1 and rank 0 have files of different saves" in message
        assert taken == "earlier"


def _two_engines(folder: str) -> list[bool]:
    first = engine_of(checkpoint={"asynchronous": True})
    second = engine_of(net(width=48), checkpoint={"asynchronous": True})
    for engine in (first, second):
        step(engine)
        engine.save_checkpoint(folder)
    first.wait_for_checkpoint()
    second.wait_for_checkpoint()
    return [Checkpoint(Path(folder, "global_step1")).verify() > 0, not list(Path(folder).glob(".*.tmp"))]


def test_two_engines_that_save_under_one_name_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    assert run_workers(_two_engines, 1, str(tmp_path)) == [[True, True]]


def _put_in_place(folder: Path, name: str) -> None:
    for number in range(100):
        temporary = folder / f".t.{name}-{number}.tmp"
        temporary.mkdir()
        (temporary / MANIFEST).write_text(name)
        put_in_place(temporary, folder / "t")


def test_saves_of_one_tag_are_put_in_place_one_after_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(_put_in_place, tmp_path, str(number)) for number in range(4)]:
            job.result()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def _export_twice(folder: str) -> None:
    engine = engine_of()
    engine.save_checkpoint(folder)
    path = find(folder)
    assert path is not None
    out = Path(folder, "out")
    export(Checkpoint(path), out)
    export(Checkpoint(path), out)
    with pytest.raises(CheckpointError, match=r"has other weights \(model.safetensors\)"):
        export(Checkpoint(path), out, max_shard_bytes=9000)
    with pytest.raises(CheckpointError, match="has other weights"):
        export(Checkpoint(path), out, kind="bin")
    sharded = Path(folder, "sharded")
    export(Checkpoint(path), sharded, max_shard_bytes=9000)
    export(Checkpoint(path), sharded, max_shard_bytes=9000)
    with pytest.raises(CheckpointError, match="has other weights"):
        export(Checkpoint(path), sharded)


def test_an_export_does_not_mix_with_another(tmp_path: Path) -> None:
    run_workers(_export_twice, 1, str(tmp_path))


# -- odd states


class Odd(torch.optim.Optimizer):
    """Keeps state in other dtypes, and counts in a tensor of shape [1]."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = torch.zeros(1)
                    state["m"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["v"] = torch.zeros_like(p, dtype=torch.float64)
                    state["seen"] = torch.zeros_like(p, dtype=torch.int32)
                state["count"].add_(torch.ones(1))
                state["m"].mul_(0.9).add_(p.grad.bfloat16(), alpha=0.1)
                state["v"].add_(p.grad.double().square())
                state["seen"].add_(1)
                p.sub_(group["lr"] * state["m"].float() / (state["v"].sqrt().float() + 1e-3))


def _every_one_goes_on(folder: str, pairs: list[tuple[str, str]], steps: int) -> list[tuple[str, str]]:
    """Returns the pairs of an optimizer and a schedule that do not."""
    return [pair for i, pair in enumerate(pairs) if not _goes_on(f"{folder}/{i}", *pair, steps)]


def _goes_on(folder: str, make: Any, schedule: Any, steps: int) -> bool:
    make, schedule = OPTIMIZERS[make], SCHEDULES.get(schedule)
    data = batches(steps, 12)
    options = {"optimizer": make, "scheduler": schedule, "stage": 2, "zero_allow_untested_optimizer": True}
    straight = engine_of(**options)
    want = train_engine(straight, data)
    begun = engine_of(**options)
    losses = train_engine(begun, data[: steps // 2])
    begun.save_checkpoint(folder)
    went = engine_of(**options)
    train_engine(went, data[:1])
    went.load_checkpoint(folder)
    losses += train_engine(went, data[steps // 2 :])
    same = all(
        torch.equal(value, straight.module.state_dict()[name])
        for name, value in went.module.state_dict().items()
    )
    same = losses == want and same and went.get_lr() == straight.get_lr()
    for engine in (straight, begun, went):
        engine.destroy()
    return same


OPTIMIZERS: dict[str, Any] = {
    "odd": Odd,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}
SCHEDULES: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1, 3])], [3]
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
}


@pytest.mark.rotated
def test_every_optimizer_goes_on_exactly(tmp_path: Path) -> None:
    pairs = [(name, "") for name in OPTIMIZERS]
    assert run_workers(_every_one_goes_on, 2, str(tmp_path), pairs, 6) == [[]] * 2


def test_every_schedule_goes_on_exactly(tmp_path: Path) -> None:
    pairs = [("adam", name) for name in SCHEDULES]
    assert run_workers(_every_one_goes_on, 1, str(tmp_path), pairs, 8) == [[]]


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.single = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("void", torch.empty(0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.single + self.none.sum()


def _odds(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = engine_of(Empties())
    step(engine)
    engine.save_checkpoint(folder, "empty")
    names = engine.module.state_dict().keys()
    found["empties"] = get_fp32_state_dict_from_zero_checkpoint(folder, "empty").keys() == names
    found["nothing is excluded"] = Checkpoint(Path(folder, "empty")).manifest["excluded"] == []
    engine.load_checkpoint(folder)
    step(engine)
    # a static loss scale stays what the config says
    dynamic = engine_of(fp16={"enabled": True, "initial_scale_power": 20})
    dynamic.save_checkpoint(folder, "dynamic")
    static = engine_of(fp16={"enabled": True, "loss_scale": 128})
    static.load_checkpoint(folder)
    found["loss scale"] = static.loss_scale == 128
    again = engine_of(fp16={"enabled": True, "initial_scale_power": 4})
    again.load_checkpoint(folder)
    found["dynamic"] = again.loss_scale == 2**20
    # a rate in a tensor, into an optimizer that takes numbers
    tensor = engine_of(optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True))
    step(tensor)
    tensor.save_checkpoint(folder, "rate")
    plain = engine_of(optimizer=lambda p: torch.optim.AdamW(p, lr=1.0, foreach=True))
    plain.load_checkpoint(folder)
    step(plain)
    found["rate"] = plain.get_lr() == [pytest.approx(1e-3)]

    def message(key: str, action: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            action()
        found[key] = str(caught.value)

    model = net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": wide, "lr": 1.0}, {"params": narrow}]
    engine = engine_of(model, torch.optim.AdamW(groups))
    engine.save_checkpoint(folder, "groups")
    model = net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": narrow}, {"params": wide, "lr": 1.0}]
    other = engine_of(model, torch.optim.AdamW(groups))
    message("groups", lambda: other.load_checkpoint(folder))
    scheduled = engine_of(scheduler=SCHEDULES["cosine"])
    scheduled.save_checkpoint(folder, "cosine")
    message("schedule", lambda: engine_of(scheduler=SCHEDULES["lambda"]).load_checkpoint(folder))
    settings = {"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 2}}
    configured = zlaunch.initialize(model=net(), config=config(1, 12, scheduler=settings))[0]
    configured.save_checkpoint(folder, "warmup")
    message("other schedule", lambda: engine_of(scheduler=SCHEDULES["lambda"]).load_checkpoint(folder))
    circular: list[Any] = []
    circular.append(circular)
    message("circle", lambda: engine.save_checkpoint(folder, client_state={"a": circular}))
    message("number", lambda: engine.save_checkpoint(folder, client_state={"a": 10**5000}))
    assert not list(Path(folder).glob(".*"))
    state = {"a": (1, [2.5, {"b": None}]), 3: float("inf"), "__tuple__": "x", (1, 2): True, "n": float("nan")}
    engine.save_checkpoint(folder, 7, client_state=state)
    _, back = engine.load_checkpoint(folder, 7)
    found["values"] = repr(back) == repr(state)
    engine.client_state = lambda: {"epoch": 3}
    engine.save_checkpoint(folder, "own")
    engine.save_checkpoint(folder, "given", client_state={"epoch": 4})
    own, given = (engine.load_checkpoint(folder, tag)[1] for tag in ("own", "given"))
    found["function"] = own == {"epoch": 3} and given == {"epoch": 4}
    return found


def test_odd_states_and_clear_refusals(tmp_path: Path) -> None:
    (found,) = run_workers(_odds, 1, str(tmp_path))
    texts = {
        "groups": "in parameter group 0, but the optimizer has it in group 1",
        "schedule": "has the state of the scheduler CosineAnnealingLR, but the engine has LambdaLR: "
        "pass load_lr_scheduler_states=False to restart the schedule; with the Trainer, omit scheduler in",
        "other schedule": "; with the Trainer, keep scheduler.type WarmupDecayLR in the config",
        "circle": "RecursionError",
        "number": "client_state['a'] is a number of 16610 bits",
    }
    for key, text in texts.items():
        assert text in found.pop(key)
    assert found == dict.fromkeys(found, True) and len(found) == 7


# -- processes that end


ENDS = """
import os, sys, torch, torch._dynamo, zlaunch, zlaunch.runtime.api
from zlaunch.runtime.checkpoint import save
root = sys.argv[1]
for mode in sys.argv[2:]:  # each in a process of its own, which is spared the imports
    if not (child := os.fork()):
        break
    print(mode, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
folder = f"{root}/{mode}"
for end, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(f"{root}/{mode}.{name}", os.O_WRONLY | os.O_CREAT), end)
given = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}},
         "checkpoint": {"asynchronous": mode == "late"}}
engine, *_ = zlaunch.initialize(model=torch.nn.Linear(300, 300), config=given)
engine.backward(engine(torch.ones(1, 300)).sum())
engine.step()
def fail(self):
    if mode == "interrupt":
        raise KeyboardInterrupt
    raise OSError(28, "No space left on device")
save.Save._finish = fail
engine.save_checkpoint(folder)
"""


@pytest.mark.exhaustive
def test_a_process_ends_and_says_so(tmp_path: Path) -> None:
    """Ctrl-C in a save leaves no thread behind; a save that fails after the last step is a failure."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "interrupt", "late"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert codes.keys() == {"interrupt", "late"}
    for mode, code in (("interrupt", "130"), ("late", "1")):
        assert codes[mode] in (code, "-2"), (tmp_path / f"{mode}.stderr").read_text()
        assert list((tmp_path / mode).iterdir()) == []
    said = (tmp_path / "late.stdout").read_text()
    assert "the checkpoint was not saved: rank 0: no space left on the disk" in said


def _signal(folder: str) -> Any:
    """The emergency save is made though an earlier one has failed, and though client_state raises."""
    import signal

    saved = Path(folder, "saved")
    engine = engine_of(
        checkpoint={"on_signal": True, "save_dir": str(saved), "asynchronous": True, "keep_last": 1}
    )
    base = Path(folder, "base")
    with contextlib.redirect_stdout(io.StringIO()) as warned:
        engine.save_checkpoint(base, tag="global_step0")
    engine.wait_for_checkpoint()
    engine.load_checkpoint(base, load_module_only=True)
    step(engine)
    real = Save._finish

    def fails(self: Any) -> Any:
        raise OSError(28, "No space left on device")

    Save._finish = fails  # type: ignore[method-assign]
    engine.save_checkpoint(saved)
    assert engine.checkpoints._background._thread is not None
    engine.checkpoints._background._thread.join()
    Save._finish = real  # type: ignore[method-assign]
    assert engine.checkpoints._background.has_unreported_failure
    nothing: dict[str, Any] = {}
    engine.client_state = lambda: nothing["missing"]
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as caught:
        step(engine)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine.load_checkpoint(saved)
    if engine.global_rank == 0:
        assert (
            f"saves to {base}, but a save on a signal goes to checkpoint.save_dir ({saved})"
            in warned.getvalue()
        )
        assert "global_step2 was saved on a signal and has no client_state: set" in told.getvalue()
    return (
        caught.value.code,
        (base / "global_step0").exists(),
        json.loads((saved / "global_step2" / "manifest.json").read_text())["client_state"],
    )


def test_the_save_that_a_signal_asks_for_is_made(tmp_path: Path) -> None:
    assert run_workers(_signal, 2, str(tmp_path)) == [(75, True, {})] * 2


def _asked(folder: str, on_signal: bool, reads: bool, handles: bool) -> list[Any]:
    """Return what a rank tells the launcher of whether it acts on SIGUSR1."""
    import signal

    path = Path(folder, f"events_{on_signal}{reads}{handles}")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    if handles:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    engine = engine_of(checkpoint={"on_signal": on_signal, "save_dir": folder})
    step(engine)
    if reads:
        assert not engine.should_stop and not engine.should_stop
    os.kill(os.getpid(), signal.SIGUSR1)
    os.environ.pop("ZLAUNCH_EVENT_FD")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["acts"] for event in events if event["type"] == "save_asked"]


@pytest.mark.parametrize(
    ("on_signal", "reads", "handles"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_the_launcher_hears_whether_a_signal_saves(
    tmp_path: Path, on_signal: bool, reads: bool, handles: bool
) -> None:
    acts = on_signal or reads or handles
    assert run_workers(_asked, 1, str(tmp_path), on_signal, reads, handles) == [[acts]]


def test_differences_are_seen() -> None:
    """Of the comparison that the other tests rest on."""
    one = {"a": torch.zeros(2), "b": 1}
    assert differences(one, {"a": torch.zeros(2), "b": 1}) == []
    assert differences(one, {"a": torch.tensor([0.0, 1e-45]), "b": 1}) == ["a"]
    assert differences(one, {"a": torch.zeros(2)}) == ["b"]
