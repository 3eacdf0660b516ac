"""Test small models of one's own on ranks that have different layers: what is refused, and unusual steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.workers import WorkerError, join, run_workers

WIDTH, MICRO_BATCHES = 4, 2


class Network(nn.Module):
    """Has layers between an embedding and a head, and something unusual."""

    def __init__(self, unusual: str = "", layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.unusual = unusual
        self.words = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9)
        if unusual == "no list":
            self.layers = nn.ModuleList([Layer(), nn.Linear(WIDTH, WIDTH)])
        if unusual == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if unusual == "attention":
            self.norm = nn.MultiheadAttention(WIDTH, 1)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        if self.unusual == "late module":
            hidden = self.norm(hidden)
        first = hidden
        if self.unusual == "mask":
            mask = self.words(words).sum(-1, keepdim=True) > 0
            for layer in self.layers:
                layer.mask = mask
        further = hidden.detach().requires_grad_() if self.unusual == "further" else None
        for index, layer in enumerate(self.layers):
            if self.unusual == "raises" and index == 3:
                hidden = layer(hidden, fails=True)
                continue
            hidden = layer(hidden, further)
            if self.unusual == "between":
                hidden = hidden * 2
            if self.unusual == "in place":
                with torch.no_grad():
                    hidden.mul_(2)
            if self.unusual == "middle head" and index == 1:
                self.norm(hidden)
        if self.unusual == "early module":
            hidden = hidden + self.words(words)
        if self.unusual == "too few":
            return self.head(self.norm(self.layers[0](hidden)))
        if self.unusual == "residual":
            hidden = hidden + first
        logits: Tensor = self.head(self.norm(hidden))
        if self.unusual == "penalty":
            logits = logits + sum(p.square().sum() for p in self.layers.parameters())
        return logits


class Layer(nn.Module):
    """Is a layer, which fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.mask: Tensor | None = None
        self.counts = self.keeps = False

    def forward(self, hidden: Tensor, further: Any = None, fails: bool = False) -> Tensor:
        if fails:
            raise ArithmeticError("this layer fails")
        if self.counts:
            self.count += 1
        if self.keeps:
            self.kept = hidden
        if self.mask is not None:
            hidden = hidden * self.mask
        return hidden + torch.tanh(self.linear(hidden))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def config(**changes: Any) -> dict[str, Any]:
    """Return a config of two ranks that divide the layers."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "parallel": {"pipeline": 2},
        **changes,
    }


def micro_batches(count: int = 20, length: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Make micro-batches."""
    chance = torch.Generator().manual_seed(2)
    found = [torch.randint(9, (2, length), generator=chance) for _ in range(count)]
    return [(each, each) for each in found]


def start(model: nn.Module, **changes: Any) -> Any:
    """Return an engine."""
    return zlaunch.initialize(model=model, config=config(**changes))[0]


def _refused_at_once() -> list[str]:
    join()
    said = []

    def refused(use: Any) -> None:
        with pytest.raises(
            (zlaunch.ParameterError, zlaunch.ConfigError, zlaunch.RankMismatchError)
        ) as caught:
            use()
        said.append(str(caught.value))

    refused(lambda: start(Network("no list")))
    refused(lambda: start(Network(layers=2), pipeline={"schedule": "interleaved"}))
    refused(lambda: start(Network(), pipeline={"partition": [2, 3]}))
    refused(lambda: start(Network("batch norm")))
    refused(lambda: start(Network("attention")))
    for stage in (2, 3):
        refused(lambda stage=stage: start(Network(), zero_optimization={"stage": stage}))
    rank = torch.distributed.get_rank()
    engine = start(Network())
    data = micro_batches()
    refused(lambda: engine(data[0][0]))
    refused(lambda: engine.backward(torch.zeros(())))
    refused(lambda: engine.step())
    refused(lambda: engine.train_batch())
    refused(lambda: engine.train_batch(iter([data[0][0]] * 2)))
    refused(lambda: engine.train_batch(iter(data[rank:]), loss_fn))
    refused(lambda: engine.train_batch(iter([data[0], micro_batches(1, 5)[0]]), loss_fn))
    engine.train_batch(iter(data), loss_fn)
    engine = start(Network(), pipeline={"schedule": "interleaved"}, gradient_accumulation_steps=3)
    refused(lambda: engine.train_batch(iter(data), loss_fn))
    refused(lambda: engine.module(data[0][0]))
    return said


SAID = [
    "Network has no nn.ModuleList of layers of one class",
    "cannot split 2 layers into 4 parts",
    "[2, 3] does not split 4 layers into 2 parts",
    "norm, a BatchNorm1d, keeps running statistics",
    "norm, a MultiheadAttention, must run on every stage",
    "is 2, and pipeline parallelism supports ZeRO stages 0 and 1",
    "is 3, and pipeline parallelism supports ZeRO stages 0 and 1",
    "engine(...) is not supported",
    "engine.backward() is not supported",
    "engine.step() is not supported",
    "needs data_iter, or training_data",
    "a pair of inputs and labels, got Tensor",
    "got different batches",
    "must have one shape, got",
    "a multiple of the 2 stages, got 3",
    "called outside engine.train_batch and eval_batch",
]


def test_what_is_refused_on_all_ranks() -> None:
    for said in run_workers(_refused_at_once, 2):
        assert len(said) == len(SAID)
        for text, expected in zip(said, SAID, strict=True):
            assert expected in text, text


def _train_unusual(unusual: str, has_loss: bool) -> None:
    join()
    model = Network(unusual)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.counts, layer.keeps = unusual == "counts", unusual == "keeps"
    start(model).train_batch(iter(micro_batches()), loss_fn if has_loss else None)


@pytest.mark.parametrize(
    ("unusual", "said"),
    [
        ("between", r"the input of layers\.1 is not the output of the preceding layer"),
        ("further", r"layers\.0 gets a second tensor that requires a gradient"),
        ("late module", "norm is used before the layers but registered after them"),
        ("early module", "words is used after the layers but registered before them"),
        ("too few", r"layers\.0 is layer 0 of the model, but"),
        ("in place", r"the input of layers\.1 is not the output of the preceding layer"),
        ("middle head", "norm is used before the layers but registered after them"),
        ("residual", "the loss depends on another stage's values"),
        ("penalty", "the loss depends on another stage's values"),
        ("mask", r"the output of layers\.2 depends on another stage's values"),
        ("counts", r"training changes the buffer layers\.0\.count"),
        ("keeps", r"stores a tensor in layers\.0\.kept, which other stages do not have"),
        ("raises", r"\nArithmeticError: this layer fails\s*$"),
    ],
)
def test_what_a_pass_refuses(unusual: str, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        run_workers(_train_unusual, 2, unusual, True)


def test_a_loss_is_needed() -> None:
    with pytest.raises(WorkerError, match="output has no loss: pass loss_fn"):
        run_workers(_train_unusual, 2, "", False)


def _ends_early() -> None:
    rank = join()
    start(Network()).train_batch(iter(micro_batches(2 - rank)), loss_fn)


def test_data_that_ends_early_on_one_rank_does_not_hang() -> None:
    with pytest.raises(WorkerError, match="StopIteration"):
        run_workers(_ends_early, 2)


def _goes_on_after_an_error(call: str) -> None:
    rank = join()
    engine = start(Network())

    def failing(output: Tensor, labels: Tensor) -> Tensor:
        raise ArithmeticError("this loss fails")

    engine.train_batch(iter(micro_batches()), loss_fn)
    if rank == 1:
        with pytest.raises(ArithmeticError):
            engine.train_batch(iter(micro_batches()), failing)
        if call == "save":
            engine.save_checkpoint("never")
    engine.train_batch(iter(micro_batches()), loss_fn)


@pytest.mark.parametrize("call", ["train", "save"])
def test_a_stage_that_goes_on_after_an_error_does_not_hang(call: str) -> None:
    with pytest.raises(WorkerError, match="an earlier pass raised an exception on this stage"):
        run_workers(_goes_on_after_an_error, 2, call)


def _unusual_steps() -> Any:
    join()
    found: dict[str, Any] = {}
    data = micro_batches()
    scaled = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 2}
    engine = start(Network(), fp16=scaled)
    engine.train_batch(iter(data), loss_fn)
    found["overflow"] = (engine.overflow, engine.skipped_steps)
    engine.destroy()
    engine = start(Network(), bf16={"enabled": True})
    losses = [engine.train_batch(iter(data), loss_fn).item() for _ in range(20)]
    found["bf16"] = losses[-1] < losses[0] and engine.module.head.weight.dtype == torch.bfloat16
    engine.destroy()
    with pytest.raises(StopIteration):
        start(Network()).train_batch(iter(data[:1]), loss_fn)
    return found


def test_unusual_steps() -> None:
    for found in run_workers(_unusual_steps, 2):
        assert found == {"overflow": (True, 1), "bf16": True}


def _goes_back(folder: str) -> list[float]:
    join()
    samples = torch.randint(9, (20, 3), generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(samples, samples)
    model = Network()
    model.loss_fn = loss_fn  # type: ignore[assignment]  # torch's modules take any attribute
    engine, *_ = zlaunch.initialize(model=model, config=config(), training_data=data)
    engine.train_batch()
    engine.save_checkpoint(folder)
    losses = [engine.train_batch().item() for _ in range(2)]
    engine.load_checkpoint(folder)
    return losses + [engine.train_batch().item() for _ in range(2)]


def test_a_load_goes_back_in_the_data_as_well(tmp_path: Path) -> None:
    for losses in run_workers(_goes_back, 2, str(tmp_path)):
        assert losses[:2] == losses[2:] and losses[0] != losses[1]


def _without_stages(stages: int) -> Any:
    join()
    torch.set_default_dtype(torch.float64)
    section = {"pipeline": {"stages": stages}} if stages else {}
    engine = start(Network(), parallel={}, **section)
    given = iter(micro_batches())
    losses = [engine.train_batch(given, loss_fn).item() for _ in range(3)]
    losses.append(engine.eval_batch(given, loss_fn, num_micro_batches=3).item())
    with pytest.raises(zlaunch.ParameterError, match="is a list, which would restart"):
        engine.train_batch(micro_batches(), loss_fn)
    with pytest.raises(StopIteration, match=r"ended after 1 of 2"):
        engine.train_batch(iter(micro_batches(1)), loss_fn)
    return losses, engine.last_loss.item() == losses[2]


def test_one_stage_takes_whole_steps_as_several_do() -> None:
    (losses, is_last), *_ = run_workers(_without_stages, 1, 1)
    assert is_last
    for own, _ in run_workers(_without_stages, 2, 2):
        assert own == pytest.approx(losses, abs=1e-12)
    assert run_workers(_without_stages, 1, 0) == [(losses, True)], "without a pipeline section"


def _counted_by_the_script() -> None:
    join()
    engine = start(Network(), parallel={}, managed_gradient_accumulation=False)
    engine.train_batch(iter(micro_batches()), loss_fn)


def test_a_script_that_counts_micro_batches_has_no_whole_steps() -> None:
    with pytest.raises(WorkerError, match="managed_gradient_accumulation is false"):
        run_workers(_counted_by_the_script, 1)


FROZEN = {
    "none": [],
    "first stage": ["words", "layers.0", "layers.1"],
    "last": ["layers.2", "layers.3", "head"],
}


def _train(frozen: list[str], stages: int, bucket: int) -> Any:
    join()
    torch.set_default_dtype(torch.float64)
    model = Network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    data = micro_batches()
    losses = []
    zero = {"stage": 1, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stages == 1:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            loss = torch.stack([loss_fn(model(words), labels) for words, labels in data[:2]]).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.2)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict()
    engine = start(model, gradient_clipping=0.2, zero_optimization=zero, parallel={"pipeline": stages})
    for _ in range(3):
        losses.append(engine.train_batch(iter(data), loss_fn).item())
    state = engine.module.state_dict()
    engine.module.load_state_dict({name: value.clone() for name, value in state.items()})
    assert all(torch.equal(a, state[n]) for n, a in engine.module.state_dict().items())
    copied = copy.deepcopy(engine.module)
    assert copied.state_dict().keys() == state.keys()
    return losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("frozen", "stages", "bucket"),
    [("none", 2, 5 * 10**8), ("none", 2, 60), ("none", 4, 60), ("first stage", 2, 60), ("last", 2, 60)],
)
def test_training_equals_one_process(frozen: str, stages: int, bucket: int) -> None:
    losses, weights = run_workers(_train, 1, FROZEN[frozen], 1, bucket)[0]
    for own, state in run_workers(_train, stages, FROZEN[frozen], stages, bucket):
        assert own == pytest.approx(losses, abs=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
