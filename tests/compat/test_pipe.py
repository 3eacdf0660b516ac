"""Test DeepSpeed's PipelineModule: what its tutorial writes, on ranks that divide the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.model_parallel import TOLERANCE, distance
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.compat.deepspeed.parallel import take_over_sizes
from zlaunch.compat.deepspeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
)

STEPS, BATCH, MICRO_BATCHES = 5, 8, 2
WORDS, WIDTH, LENGTH = 13, 8, 6


def _deepspeed() -> Any:
    import zlaunch.compat.deepspeed

    zlaunch.compat.deepspeed.install()
    import deepspeed

    return deepspeed


class AlexNet(nn.Module):
    """Is torchvision's network of this name in small, with the tutorial's method."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(4, 6, kernel_size=3),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Linear(24, 12), nn.ReLU(inplace=True), nn.Linear(12, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x

    def to_layers(self) -> list[Any]:
        """Return the layers as the tutorial lists them."""
        return [*self.features, self.avgpool, lambda x: torch.flatten(x, 1), *self.classifier]


class EmbeddingPipe(nn.Embedding):
    """Takes words and their places, as a tuple."""

    def forward(self, inputs: Any) -> Tensor:
        words, places = inputs
        return super().forward(words) + places.unsqueeze(-1) / 10


class Block(nn.Module):
    """Is a layer of a transformer."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + self.mlp(hidden)


def _head(embedding: nn.Embedding, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, embedding.weight)


def transformer_specs() -> list[Any]:
    """Return a transformer whose embedding is its head."""
    return [
        TiedLayerSpec("embed", EmbeddingPipe, WORDS, WIDTH),
        LayerSpec(Block, WIDTH),
        LayerSpec(Block, WIDTH, heads=4),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", EmbeddingPipe, WORDS, WIDTH, forward_fn=_head),
    ]


def lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(kind: str, stages: int, **options: Any) -> PipelineModule:
    """Return the module of a test in float64."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    if kind == "net":
        options = {"loss_fn": nn.CrossEntropyLoss(), **options}
        return PipelineModule(layers=AlexNet().to_layers(), num_stages=stages, **options)
    return PipelineModule(transformer_specs(), num_stages=stages, loss_fn=lm_loss, **options)


def data(kind: str, steps: int = STEPS) -> list[tuple[Any, Tensor]]:
    """Make the batches of all steps, over all ranks."""
    chance = torch.Generator().manual_seed(5)
    if kind == "net":
        return [
            (
                torch.randn(BATCH, 3, 8, 8, generator=chance, dtype=torch.float64),
                torch.randint(5, (BATCH,), generator=chance),
            )
            for _ in range(steps)
        ]
    words = [torch.randint(WORDS, (BATCH, LENGTH), generator=chance) for _ in range(steps)]
    places = torch.arange(LENGTH, dtype=torch.float64).expand(BATCH, LENGTH)
    return [((each, places), each.roll(-1, 1)) for each in words]


def micro_batches(engine: Any, batches: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    """Cut batches into this rank's micro-batches."""
    count, at = engine.data_parallel_size, engine.data_parallel_rank
    found = []
    for inputs, labels in batches:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        pieces = [t.chunk(count)[at].chunk(MICRO_BATCHES) for t in (*tensors, labels)]
        for *parts, own in zip(*pieces, strict=True):
            found.append((tuple(parts) if isinstance(inputs, tuple) else parts[0], own))
    return found


def config(samples: int, **changes: Any) -> dict[str, Any]:
    """Return a config for so many ranks of different samples."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // samples // MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1},
        **changes,
    }


def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train one process by plain torch; return the losses and the weights."""
    model = make(kind, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for inputs, labels in data(kind):
        outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        assert model.loss_fn is not None
        loss = model.loss_fn(outputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _train(kind: str, stages: int, options: dict[str, Any], section: dict[str, Any]) -> Any:
    join()
    deepspeed = _deepspeed()
    world = torch.distributed.get_world_size()
    net = make(kind, stages, **options)
    changes: dict[str, Any] = {"pipeline": section} if section else {}
    if stages == 2:  # units of less than a layer
        changes["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 200, "allgather_bucket_size": 200}
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        config=config(world // stages, **changes),
    )
    assert isinstance(engine, deepspeed.PipelineEngine)
    given = options | section
    assert net.activation_checkpoint_interval == given.get("activation_checkpoint_interval", 0)
    assert (engine.num_stages, engine.stage_id) == (stages, torch.distributed.get_rank() // (world // stages))
    data_iter = iter(micro_batches(engine, data(kind)))
    before = engine.eval_batch(iter(micro_batches(engine, data(kind, 1)))).item()
    losses = [engine.train_batch(data_iter).item() for _ in range(STEPS)]
    with pytest.raises(StopIteration):
        engine.train_batch()
    assert engine.global_steps == STEPS and engine.module.training
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    return losses, before, state


CASES: list[tuple[str, int, int, dict[str, Any], dict[str, Any]]] = [
    ("net", 2, 2, {"partition_method": "uniform"}, {}),
    ("net", 4, 2, {"partition_method": "type:conv|linear"}, {}),
    ("tied", 2, 2, {"activation_checkpoint_interval": 1}, {}),
    ("tied", 4, 4, {}, {"schedule": "gpipe", "activation_checkpoint_interval": 1}),
    ("tied", 2, 2, {}, {"schedule": "interleaved"}),
    ("tied", 2, 1, {}, {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "world", "stages", "options", "section"), CASES)
def test_training_equals_one_process(
    kind: str, world: int, stages: int, options: dict[str, Any], section: dict[str, Any]
) -> None:
    wanted, weights = plain(kind)
    torch.set_default_dtype(torch.float32)
    for losses, before, state in run_workers(_train, world, kind, stages, options, section):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)
        assert before == pytest.approx(wanted[0], abs=TOLERANCE)
        assert distance(state, weights) < TOLERANCE


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: list[tuple[Any, Tensor]]) -> None:
        self.rows = [row for inputs, labels in batches for row in zip(inputs, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _resume(folder: str, stages: int, is_first: bool) -> list[float]:
    """Train on training_data, which ends after three steps and begins again."""
    join()
    samples = torch.distributed.get_world_size() // stages
    engine, _, loader, _ = _deepspeed().initialize(
        model=make("net", stages), training_data=_Rows(data("net", 3)), config=config(samples)
    )
    assert loader is not None
    losses = []
    if is_first:
        losses += [engine.train_batch().item() for _ in range(2)]
        engine.save_checkpoint(folder)
        losses += [engine.train_batch().item() for _ in range(3)]
    engine.load_checkpoint(folder)
    return losses + [engine.train_batch().item() for _ in range(3)]


@pytest.mark.exhaustive
def test_a_checkpoint_resumes_with_other_stages(tmp_path: Any) -> None:
    losses = run_workers(_resume, 2, str(tmp_path), 2, True)[0]
    assert losses[5:] == losses[2:5] and losses[4] < losses[0]
    for world, stages in ((1, 1), (4, 4)):
        resumed = run_workers(_resume, world, str(tmp_path), stages, False)[0]
        assert resumed == pytest.approx(losses[2:5], abs=TOLERANCE), stages


def test_names_are_deepspeeds() -> None:
    model = make("tied", 1)
    torch.set_default_dtype(torch.float32)
    names = {name.split(".")[0] for name in model.state_dict()}
    assert names == {"1", "2", "3", "tied_modules"}
    assert [p.shape for p in model.tied_modules.parameters()] == [(WORDS, WIDTH)]
    assert model.num_pipeline_stages() == 1 and model.topology().get_dim("pipe") == 1
    assert repr(transformer_specs()[2]) == "LayerSpec(Block, 8, heads=4)"


def test_a_module_in_several_places() -> None:
    shared = nn.Linear(3, 3)
    model = PipelineModule([shared, nn.ReLU(), shared, torch.tanh])
    given = torch.randn(2, 3)
    assert torch.equal(model(given), torch.tanh(shared(shared(given).relu())))
    assert len(list(model.parameters())) == 2


def test_seeds_of_layers() -> None:
    seeds: list[int] = []
    layers = [nn.Dropout(), nn.Dropout()]
    model = PipelineModule(layers, seed_layers=True, seed_fn=seeds.append, base_seed=10)
    model(torch.ones(2))
    model(torch.ones(2))
    assert seeds == [10, 11, 20, 21, 30, 31]
    again = PipelineModule(layers, seed_layers=True)
    assert torch.equal(again(torch.ones(99)), PipelineModule(layers, seed_layers=True)(torch.ones(99)))


def test_recomputation() -> None:
    calls: list[int] = []

    def counted(function: Any, *args: Any) -> Any:
        calls.append(len(args))
        return zlaunch.checkpointing.checkpoint(function, *args)

    def run(**options: Any) -> Tensor:
        torch.manual_seed(3)
        model = PipelineModule(transformer_specs(), activation_checkpoint_func=counted, **options)
        places = torch.zeros(BATCH, LENGTH)
        loss = lm_loss(model(data("tied")[0][0][0], places), data("tied")[0][1])
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    wanted = run()
    assert calls == []
    torch.testing.assert_close(run(activation_checkpoint_interval=1), wanted)
    assert calls == [2, 1, 1, 1, 1]
    torch.testing.assert_close(run(activation_checkpoint_interval=2, checkpointable_layers=["Block"]), wanted)
    assert calls[5:] == [1, 1]


def test_the_config_takes_over_the_stages() -> None:
    given = config(1)
    model = PipelineModule([nn.Linear(2, 2)] * 4, num_stages=2)
    taken = take_over_sizes(model, given)
    assert taken["parallel"] == {"pipeline": 2} and taken["pipeline"] == {"partition": "parameters"}
    kept = take_over_sizes(model, given | {"pipeline": {"stages": 2, "partition": [1]}})
    assert kept == given | {"pipeline": {"stages": 2, "partition": [1]}}
    with pytest.raises(zlaunch.ConfigError, match=r"num_stages=2\) contradicts parallel\.pipeline"):
        take_over_sizes(model, given | {"parallel": {"pipeline": 4}})
    alone = PipelineModule([nn.Linear(2, 2)], num_stages=1)
    with pytest.raises(zlaunch.ConfigError, match=r"num_stages=1\) contradicts"):
        take_over_sizes(alone, given | {"pipeline": {"stages": 2}})
    open_ = PipelineModule([nn.Linear(2, 2)], partition_method="uniform")
    assert take_over_sizes(open_, given | {"pipeline": {"stages": 2}})["pipeline"] == {
        "stages": 2,
        "partition": "uniform",
    }
    by_axes = PipelineModule([nn.Linear(2, 2)], topology=PipeDataParallelTopology(num_pp=2, num_dp=2))
    assert take_over_sizes(by_axes, given)["parallel"] == {"pipeline": 2}


def test_weights_of_types() -> None:
    layers = [nn.Linear(2, 2), torch.tanh, nn.Linear(99, 99), LayerSpec(nn.Linear, 2, 2), nn.ReLU()]
    model = PipelineModule(layers, partition_method="type:LINEAR")
    assert model.zlaunch_weights == [6, 1, 6, 6, 1] and model.partition_method == "best"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"layers": [3]}, zlaunch.ParameterError, "layer 0 is of class int: give modules"),
        ({"partition_method": "profile"}, NotInZlaunch, "partition_method='profile'"),
        (
            {"partition_method": "type:conv"},
            zlaunch.ParameterError,
            "no layer class matches; the classes are Linear",
        ),
        ({"topology": PipeModelDataParallelTopology(2, 2, 1)}, NotInZlaunch, "axes pipe, model is not"),
        ({"topology": PipeDataParallelTopology(2, 1), "num_stages": 4}, zlaunch.ParameterError, "has 2"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        PipelineModule(**{"layers": [nn.Linear(2, 2)], **options})


def test_wrong_layers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="LayerSpec: 3 is not a subclass"):
        LayerSpec(3)  # type: ignore[arg-type]
    with pytest.raises(NotInZlaunch, match="list its layers"):
        PipelineModule([PipelineModule([nn.ReLU()])])
    with pytest.raises(NotInZlaunch, match="data_parallel_rank"):
        PipelineModule([nn.ReLU()]).mpu()
    with pytest.raises(NotInZlaunch, match="leave out mpu"):
        _deepspeed().initialize(model=PipelineModule([nn.Linear(2, 2)]), mpu=object(), config=config(1))


class _Two(nn.Module):
    def forward(self, hidden: Any) -> Any:
        return hidden, hidden


class _Sum(nn.Module):
    def forward(self, hidden: Any) -> Any:
        return hidden[0] + hidden[1]


def _refusals() -> list[str]:
    join()
    deepspeed = _deepspeed()
    said = []

    def refused(use: Any) -> None:
        try:
            use()
        except (zlaunch.ParameterError, zlaunch.ConfigError, NotInZlaunch) as error:
            said.append(str(error))

    layers = [nn.Linear(2, 2), _Two(), _Sum(), nn.Linear(2, 2)]
    given = config(1) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    pairs = [(torch.randn(1, 2), torch.randn(1, 2))] * 2
    for bounds, stage in (([2], 1), ([1], 1), ([1], 2)):
        section = {"pipeline": {"partition": bounds}, "zero_optimization": {"stage": stage}}
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())

        def train(model: Any = model, section: dict[str, Any] = section) -> None:
            engine, *_ = deepspeed.initialize(model=model, config=given | section)
            engine.train_batch(iter(pairs))
            refused(lambda: engine.eval_batch(iter(pairs), return_logits=True))
            refused(lambda: engine.eval_batch(iter(pairs), compute_loss=False))
            refused(lambda: engine.eval_batch(iter(pairs), reduce_output="max"))
            refused(lambda: engine(pairs[0][0]))
            refused(lambda: engine.train_batch(iter([1, 2])))

        if bounds == [2]:
            continue
        refused(train)
    return said


def test_what_an_engine_refuses() -> None:
    for said in run_workers(_refusals, 2):
        for text, expected in zip(
            said,
            [
                r"eval_batch(return_logits=True)",
                r"eval_batch(compute_loss=False)",
                r"eval_batch(reduce_output='max')",
                r"engine(...) is not supported",
                r"a pair of inputs and labels, got int",
                r"supports ZeRO stages 0 and 1",
            ],
            strict=True,
        ):
            assert expected in text


def _hands_on_a_tuple() -> None:
    join()
    layers = [nn.Linear(2, 2), _Two(), _Sum(), nn.Linear(2, 2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
    given = config(1) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = _deepspeed().initialize(model=model, config=given | {"pipeline": {"partition": [2]}})
    engine.train_batch(iter([(torch.randn(1, 2), torch.randn(1, 2))] * 2))


def test_a_tuple_between_stages_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"layer 1 returns a tuple: join the tensors \(torch\.cat\)"):
        run_workers(_hands_on_a_tuple, 2)
