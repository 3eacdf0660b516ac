"""Drill the data: kill runs, resume them with other ranks, and count which samples trained. See drills.py."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.e2e.helpers import run

GLOBAL_BATCH = 24
"""Counts the samples of a step: they divide into 1 to 4 ranks with 1 or 2 micro-batches."""
KINDS = ("map", "stream", "huggingface", "loader", "sampler", "packed")
_SCRIPT = """
    import json, os, signal, sys
    import torch, zlaunch
    from torch import nn
    from torch.utils import data
    from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
    from zlaunch.data import TokenBatchSampler

    plan = json.loads(sys.argv[1])
    phase = json.loads(sys.argv[2])
    number = sys.argv[3]
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    micro = plan["global_batch"] // world // phase["accumulation"]
    if plan["kind"] == "huggingface":
        from datasets import Dataset

    class Numbers(data.Dataset):
        def __len__(self):
            return plan["samples"]
        def __getitem__(self, index):
            return index

    class Stream(IterableDataset):
        epoch = 0
        def set_epoch(self, epoch):
            self.epoch = epoch
        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            yield from torch.randperm(plan["samples"], generator=generator).tolist()

    def source():
        workers = {"num_workers": plan["workers"], "persistent_workers": plan["workers"] > 1}
        if plan["kind"] == "map":
            return Numbers()
        if plan["kind"] == "stream":
            return Stream()
        if plan["kind"] == "huggingface":
            rows = Dataset.from_dict({"number": list(range(plan["samples"]))}).with_format("torch")
            return rows.to_iterable_dataset(num_shards=plan["shards"]).shuffle(seed=3, buffer_size=10)
        if plan["kind"] == "loader":
            return DataLoader(Numbers(), batch_size=micro, shuffle=True, **workers)
        if plan["kind"] == "sampler":
            sampler = WeightedRandomSampler(torch.ones(plan["samples"]), plan["samples"], replacement=False)
            return DataLoader(Numbers(), batch_size=micro, sampler=sampler, **workers)
        lengths = [1 + index % 5 for index in range(plan["samples"])]
        return DataLoader(Numbers(), batch_sampler=TokenBatchSampler(lengths, 12), **workers)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.Linear(16, 1)).double()
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": phase["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": plan["stage"]},
        "checkpoint": {"asynchronous": plan["asynchronous"], "keep_last": 2},
        "data_loader": {"num_workers": plan["workers"]},
    }
    engine, *_ = zlaunch.initialize(model=model, config=config)
    loader = engine.dataloader(source())
    epoch = 0
    engine.client_state = lambda: {"epoch": epoch}
    _, state = engine.load_checkpoint(zlaunch.resume_dir("checkpoints"))
    records = open(f"records.{number}.{rank}", "w", buffering=1)
    print(json.dumps({"start": engine.global_steps}), file=records)
    ids = []
    for epoch in range((state or {}).get("epoch", 0), plan["epochs"]):
        for batch in loader:
            if plan["kind"] == "huggingface":
                batch = batch["number"]
            x = torch.stack([(batch * factor).double().sin() for factor in (0.1, 1.0, 2.0)], 1)
            before = engine.global_steps
            loss = (engine(x) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            ids += batch.tolist()
            if engine.global_steps == before:
                continue
            step = engine.global_steps
            print(json.dumps({"step": step, "epoch": epoch, "ids": ids, "loss": float(loss)}), file=records)
            ids = []
            if step % plan["save_every"] == 0:
                engine.save_checkpoint("checkpoints")
            if step == phase["kill"] and rank == phase["victim"]:
                os.kill(os.getpid(), signal.SIGKILL)
    assert not ids, "the last step is whole"
    weights = engine.module.state_dict()
    if rank == 0:
        torch.save(weights, f"weights.{number}")
"""


@dataclass(frozen=True, slots=True)
class _Phase:
    """Describes one launch."""

    world: int
    accumulation: int
    kill: int
    """The step after which a worker is killed; 0 if none is."""
    victim: int


@dataclass(frozen=True, slots=True)
class _Drill:
    """Describes one drill."""

    number: int
    kind: str
    samples: int
    epochs: int
    shards: int
    """Counts the files that Hugging Face's stream reads."""
    workers: int
    stage: int
    save_every: int
    asynchronous: bool
    phases: tuple[_Phase, ...]

    @property
    def is_elastic(self) -> bool:
        """Tell whether the number of ranks or of micro-batches changes."""
        return len({(phase.world, phase.accumulation) for phase in self.phases}) > 1


def _drill(seed: int, number: int) -> _Drill:
    dice = random.Random(f"{seed}.{number}.data")
    kind = dice.choice(KINDS)
    samples = GLOBAL_BATCH * dice.randint(2, 7)
    epochs = dice.randint(1, 3)
    steps = epochs * samples // GLOBAL_BATCH
    elastic = dice.random() < 0.6
    phases = []
    world = dice.randint(1, 4)
    accumulation = 1
    for _ in range(dice.randint(1, 3)):
        if elastic:
            world = dice.randint(1, 4)
            # A packed batch has as many samples as fit, so the batches of an epoch may be odd.
            accumulation = 1 if kind == "packed" else dice.randint(1, 2)
        phases.append(_Phase(world, accumulation, dice.randint(1, max(1, steps - 1)), dice.randrange(world)))
    phases[-1] = replace(phases[-1], kill=0)
    return _Drill(
        number,
        kind,
        samples,
        epochs,
        dice.randint(1, 5),
        dice.choice((0, 0, 1, 2, 3)),
        dice.randint(0, 3),
        dice.randint(1, 3),
        dice.random() < 0.5,
        tuple(phases),
    )


def _launch(folder: Path, drill: _Drill, phase: _Phase, number: str) -> None:
    plan = json.dumps({**asdict(drill), "global_batch": GLOBAL_BATCH})
    launch = run(
        folder,
        f"--num_gpus={phase.world}",
        "--no_local_rank",
        "--grace=1",
        script=_SCRIPT,
        args=(plan, json.dumps(asdict(phase)), number),
    )
    code = launch.wait()
    # A resumed run may end before the step of the kill.
    codes = (0, 137) if phase.kill else (0,)
    assert code in codes, f"{drill}: phase {number} ended with {code}: {launch.err[-3000:]}"
    for word in ("same batch", "trained on before", "begins anew", "other order"):
        assert word not in launch.err + launch.out, f"{drill}: phase {number} said: {launch.err[-3000:]}"


def _records(folder: Path, number: int, world: int) -> tuple[int, dict[int, list[dict[str, Any]]]]:
    """Return the step that a phase began after, and its records by step, of all ranks."""
    start = -1
    by_step: dict[int, list[dict[str, Any]]] = {}
    for rank in range(world):
        # The last line of a killed rank may be incomplete.
        lines = (folder / f"records.{number}.{rank}").read_text().split("\n")[:-1]
        first, *others = map(json.loads, lines)
        assert start in (-1, first["start"]), "all ranks resume from the same step"
        start = first["start"]
        for record in others:
            by_step.setdefault(record["step"], []).append(record)
    return start, by_step


def _effective(folder: Path, drill: _Drill) -> list[list[dict[str, Any]]]:
    """Return the records of the steps that the last weights have come of, of all ranks."""
    found: dict[int, list[dict[str, Any]]] = {}
    for number, phase in enumerate(drill.phases):
        start, by_step = _records(folder, number, phase.world)
        # What came after the checkpoint that this phase began with is gone.
        found = {step: records for step, records in found.items() if step <= start}
        found |= {step: records for step, records in by_step.items() if len(records) == phase.world}
    assert sorted(found) == list(range(1, len(found) + 1)), f"{drill}: steps {sorted(found)}"
    return [found[step] for step in sorted(found)]


def _check_samples(drill: _Drill, steps: list[list[dict[str, Any]]]) -> None:
    """Check that each epoch has trained on every sample once."""
    seen = [Counter[int]() for _ in range(drill.epochs)]
    for records in steps:
        for record in records:
            seen[record["epoch"]].update(record["ids"])
    for epoch, counts in enumerate(seen):
        missing = sorted(set(range(drill.samples)) - set(counts))
        assert not missing, f"{drill}: epoch {epoch} lacks {missing}"
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        # Batches that do not divide among the ranks: a few come again at each end of an epoch.
        assert not twice or drill.kind == "packed", f"{drill}: epoch {epoch} has {twice} more than once"


def data(seed: int, number: int) -> str:
    """Do one drill; return what was done, raise AssertionError."""
    drill = _drill(seed, number)
    with tempfile.TemporaryDirectory(prefix="zdrill-") as name:
        folder = Path(name)
        for index, phase in enumerate(drill.phases):
            _launch(folder, drill, phase, str(index))
        steps = _effective(folder, drill)
        _check_samples(drill, steps)
        if not drill.is_elastic:
            _compare(folder, drill, steps)
    worlds = "-".join(str(phase.world) for phase in drill.phases)
    return f"{number}: {drill.kind}, ranks {worlds}, {drill.workers} workers, {len(steps)} steps"


def _compare(folder: Path, drill: _Drill, steps: list[list[dict[str, Any]]]) -> None:
    """Compare with a run that nobody has disturbed: the same samples, losses and weights, to the bit."""
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    last = drill.phases[-1]
    alone = replace(drill, phases=(last,))
    _launch(undisturbed, alone, last, "0")
    wanted = _effective(undisturbed, alone)
    assert steps == wanted, f"{drill}: samples or losses differ: {steps} {wanted}"
    found = torch.load(folder / f"weights.{len(drill.phases) - 1}")
    for key, value in torch.load(undisturbed / "weights.0").items():
        assert torch.equal(found[key], value), f"{drill}: {key} differs"
