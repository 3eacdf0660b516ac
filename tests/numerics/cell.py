"""Train one cell of the table: a family in one precision, at one stage, built one way, beside plain torch.

Note [What a cell is compared with]
Plain torch trains the same model in one process: it sums the gradients of each rank's micro-batch, as ranks
do. In 16 bits it has what the runtime promises: parameters and their gradients in 16 bits, sums of gradients
in fp32, fp32 masters in the optimizer. At stage 0 the sums travel as well, and are rounded to 16 bits on the
way back. Both are measured against the same loop in float64, which starts from the same masters. The
runtime's error may be 1.1 times plain torch's own.

Two ranks, because a sum of two numbers has one order: the engine and plain torch then round alike, and any
real difference stands out. BatchNorm's statistics belong to a rank, so plain torch keeps a set for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import zlaunch
from tests.numerics.families import FAMILIES, ROWS, Batch, Family, build, load

WORLD = 2
STEPS = 3
RATIO = 1.1
"""The runtime's error against float64 may be this many times plain torch's own."""
SMALL = 1e-2
"""A tensor's error is relative to its norm, but at least to this part of the largest norm: what is zero in
exact arithmetic (the gradient of a key's bias) has no relative error.
"""
PRETRAINED = "pretrained"
"""The folder in a family's folder that ``save_pretrained`` wrote."""
STAGES = (0, 1, 2, 3)
WAYS = ("plain", "init", "pretrained", "peft")
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
"""The eps keeps Adam from dividing gradients that are rounding errors by themselves."""


@dataclass(frozen=True)
class Precision:
    """Describe the precision of a cell, and how much of a difference is rounding."""

    section: Mapping[str, Any]
    """The section of the config."""
    floor: float
    """The part of an error that may come on top of plain torch's: see Note [Floors]."""
    dtype: torch.dtype = torch.float32
    """The dtype of the parameters and of what goes in."""
    autocast: torch.dtype | None = None
    scale: float = 1.0
    """The loss scale."""

    def around_forward(self) -> AbstractContextManager[Any]:
        """Give the context of plain torch's forward passes."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast("cpu", self.autocast, cache_enabled=False)


# Note [Floors]
# fp32: 1e-6, some ulps: torch's AdamW and the runtime's kernel round a step differently in the last bit. In
# 16 bits such a bit decides now and then which way a weight is rounded. From the second step on, the two
# sides can compute with weights that differ by one unit in the last place (2**-8 in bf16, 2**-11 in fp16) in
# one of a tensor's elements. Over the norm of 64 elements or more that is at most an eighth: the floor.
PRECISIONS: dict[str, Precision] = {
    "fp32": Precision({}, 1e-6),
    "bf16": Precision({"bf16": {"enabled": True}}, 2.0**-11, torch.bfloat16),
    "fp16": Precision({"fp16": {"enabled": True, "loss_scale": 128}}, 2.0**-14, torch.float16, scale=128.0),
    "autocast": Precision(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 2.0**-11, autocast=torch.bfloat16
    ),
}
EXACT = Precision({}, 0.0, torch.float64)


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    family: str
    precision: str
    stage: int
    way: str

    def __str__(self) -> str:
        return f"{self.family}-{self.precision}-{self.stage}-{self.way}"

    @property
    def refused(self) -> str | None:
        """Return the pattern of the expected error; None if the cell has to work."""
        return FAMILIES[self.family].refused.get(self.way) if self.stage == 3 else None


@dataclass
class Result:
    """Hold the outcome of a cell."""

    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Loss, gradients, weights, buffers: the runtime's error against float64, and plain torch's."""
    wrong: list[str] = field(default_factory=list)
    """Lists the differences that are failures; empty where the cell passes."""
    refused: bool = False
    """Is true if the run ended with the error that the family expects."""
    equal: bool = False
    """Is true if the first step's losses and gradients equal plain torch's bit for bit."""

    def as_json(self) -> dict[str, Any]:
        """Give the result as plain data."""
        return asdict(self)


def cells_of(family: str) -> list[Cell]:
    """List a family's cells, those that share a reference beside each other."""
    ways = [way for way in WAYS if way != "peft" or FAMILIES[family].targets is not None]
    precisions = [name for name in PRECISIONS if name not in FAMILIES[family].not_in]
    return [Cell(family, p, stage, way) for p in precisions for way in ways for stage in STAGES]


Values = dict[str, Tensor]


@dataclass
class Record:
    """Hold the numbers of one training run."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    """By step and parameter; zeros where there was none."""
    weights: Values = field(default_factory=dict)
    """The masters."""
    buffers: list[Values] = field(default_factory=list)
    """Holds the buffers of each rank."""
    names: list[str] = field(default_factory=list)
    """The keys of the model's state dict."""

    def kinds(self) -> dict[str, Values]:
        """Give what has errors, by kind."""
        losses = {f"step {step}": loss for step, loss in enumerate(self.losses)}
        buffers = {
            f"rank {rank}: {name}": value
            for rank, own in enumerate(self.buffers)
            for name, value in own.items()
            if value.is_floating_point()
        }
        return {"loss": losses, "gradients": self.gradients, "weights": self.weights, "buffers": buffers}


def settings(cell: Cell) -> dict[str, Any]:
    """Give the config of a cell; even small parameters are sharded."""
    precision = PRECISIONS[cell.precision]
    rounds = FAMILIES[cell.family].rounds_buffers and precision.dtype.itemsize == 2
    return {
        **({"data_types": {"buffer_dtype": cell.precision}} if rounds else {}),
        "train_micro_batch_size_per_gpu": ROWS // WORLD,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "zero_optimization": {
            "stage": cell.stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_module_granularity_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": 4000,
        },
        **precision.section,
    }


def share(batch: Batch, rank: int, dtype: torch.dtype) -> Batch:
    """Give one rank's rows of a global batch."""
    mine = {name: value.chunk(WORLD)[rank] for name, value in batch.items()}
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in mine.items()}


def buffers_of(model: nn.Module) -> Values:
    """Copy a model's buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def round_buffers(model: nn.Module, family: Family, precision: Precision) -> None:
    """Round buffers as the runtime does: those that torch itself has meet 16-bit weights, or a family's own
    code.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            meets = family.rounds_buffers or isinstance(module, _BatchNorm)
            if precision.dtype.itemsize == 2 and meets and buffer.is_floating_point():
                setattr(module, name, buffer.to(precision.dtype))


def built(family: Family, way: str, folder: Path) -> Any:
    """Build a model by plain torch: its constructor, ``from_pretrained`` of the folder, or with adapters."""
    if way == "pretrained":
        return load(family, str(folder / PRETRAINED))
    model = build(family)
    if way != "peft":
        return model
    import peft

    lora: dict[str, Any] = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=family.targets, **lora))


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach().clone()


# -- plain torch


def train_plain(
    model: Any, family: Family, precision: Precision, start: Values, sent_back: torch.dtype | None = None
) -> Record:
    """Train in one process from ``start``, the masters; see Note [What a cell is compared with].

    Sums of gradients are rounded to ``sent_back``, if given.
    """
    wide = torch.promote_types(precision.dtype, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = start[name].to(precision.dtype).clone()
        if precision.dtype == torch.float64:
            model.double()
        round_buffers(model, family, precision)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: start[name].to(wide).clone() for name in parameters}
    optimizer = torch.optim.AdamW(list(masters.values()), **ADAMW)
    record = Record(buffers=[buffers_of(model) for _ in range(WORLD)], names=list(model.state_dict()))
    for step in range(STEPS):
        losses = []
        sums: dict[str, Any] = {}
        for rank, buffers in enumerate(record.buffers):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            batch = share(family.batch(step), rank, precision.dtype)
            with precision.around_forward():
                out = model(**batch)
            loss = family.loss(out, batch)
            (loss * precision.scale).backward()
            losses.append(loss.detach())
            record.buffers[rank] = buffers_of(model)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0.0) + parameter.grad.to(wide)
                parameter.grad = None
        record.losses.append(torch.stack(losses).double().mean())
        for name, master in masters.items():
            master.grad = None
            if name in sums:
                total = sums[name].to(sent_back or wide).to(wide)
                master.grad = total / (WORLD * precision.scale)
            record.gradients[f"step {step}: {name}"] = _or_zeros(master.grad, master)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    record.weights = masters
    return record


# -- the engine


@contextmanager
def _announced(config: dict[str, Any]) -> Iterator[None]:
    """Tell transformers of the config, as a live HfDeepSpeedConfig does: stage 3 loads weights sharded."""
    from transformers.integrations import deepspeed as integration

    import zlaunch.compat.deepspeed

    zlaunch.compat.deepspeed.install()
    # transformers chose the base of its own HfDeepSpeedConfig before the alias was there
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config)
    integration.set_hf_deepspeed_config(alive)
    try:
        yield
    finally:
        integration.unset_hf_deepspeed_config()


def _model(family: Family, cell: Cell, folder: Path) -> Any:
    config = settings(cell)
    if cell.way == "init":
        with zlaunch.zero.Init(config_dict_or_path=config):
            return build(family)
    if cell.way == "pretrained":
        saved = folder / PRETRAINED
        if dist.get_rank() == 0 and not saved.exists():
            build(family).save_pretrained(saved)
        dist.barrier()
        with _announced(config):
            return load(family, str(saved))
    return built(family, cell.way, folder)


def _masters(model: nn.Module) -> Values:
    """Give the value of each parameter, in fp32 where it is trained. Collective."""
    found: Values = {}
    for name, parameter in model.named_parameters():
        value = zlaunch.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is None:
            with zlaunch.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        found[name] = value
    return found


def _state(model: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@dataclass
class Trained:
    """Hold the numbers of an engine's training run and the contents of its saved files."""

    record: Record
    start: Values
    first_buffers: Values
    state: Values
    narrow: Values
    wide: Values


def train_engine(cell: Cell, folder: Path) -> Trained:
    """Train a cell under an engine, and save it both ways. Collective."""
    family, precision = FAMILIES[cell.family], PRECISIONS[cell.precision]
    rank = dist.get_rank()
    engine, *_ = zlaunch.initialize(model=_model(family, cell, folder), config=settings(cell))
    model = engine.module
    start, first_buffers = _masters(model), buffers_of(model)
    record = Record()
    for step in range(STEPS):
        batch = share(family.batch(step), rank, precision.dtype)
        loss = family.loss(engine(**batch), batch)
        engine.backward(loss)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = zlaunch.safe_get_full_grad(parameter)
                record.gradients[f"step {step}: {name}"] = _or_zeros(grad, start[name])
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        record.losses.append(mean / WORLD)
    values = _masters(model)
    record.weights = {name: values[name] for name, p in model.named_parameters() if p.requires_grad}
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, buffers_of(model))
    record.buffers = everyone
    state = _state(model)
    record.names = list(state)
    out = folder / f"{cell}"
    engine.save_16bit_model(str(out), "weights.bin")
    engine.save_checkpoint(str(out))
    narrow: Values = {}
    whole: Values = {}
    if rank == 0:
        narrow = torch.load(out / "weights.bin", weights_only=True)
        whole = zlaunch.get_fp32_state_dict_from_zero_checkpoint(str(out))
    engine.destroy()
    return Trained(record, start, first_buffers, state, narrow, whole)


# -- the comparison


def errors_of(got: Values, exact: Values) -> dict[str, float]:
    """Give the relative error of each tensor."""
    norms = {name: float(value.double().norm()) for name, value in exact.items()}
    least = SMALL * max(norms.values(), default=0.0)
    return {
        name: float((got[name].double() - value.double()).norm()) / max(norms[name], least, 1e-300)
        if name in got and got[name].shape == value.shape
        else math.inf
        for name, value in exact.items()
    }


def _bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def unequal(what: str, got: Values, want: Values) -> list[str]:
    """Describe which tensors have other names, dtypes or bits."""
    lines = []
    if missing := sorted(want.keys() - got.keys()):
        lines.append(f"{what}: missing {_named(missing)}")
    if added := sorted(got.keys() - want.keys()):
        lines.append(f"{what}: added {_named(added)}")
    common = [name for name in want if name in got]
    dtypes = [f"{n} {got[n].dtype} for {want[n].dtype}" for n in common if got[n].dtype != want[n].dtype]
    if dtypes:
        lines.append(f"{what}: dtypes {_named(dtypes)}")
    same = [n for n in common if got[n].dtype == want[n].dtype and not _bits(got[n], want[n])]
    if same:
        lines.append(f"{what}: values of {_named(same)}")
    return lines


def _kinds_of(buffers: Values) -> Values:
    """Give integer buffers, and zeros for floating ones, whose values have errors."""
    return {n: torch.zeros_like(b) if b.is_floating_point() else b for n, b in buffers.items()}


def compare_errors(result: Result, floor: float, got: Record, plain: Record, exact: Record) -> None:
    """Compare errors against float64, the largest of each kind."""
    first = [
        {n: v for n, v in {**r.kinds()["loss"], **r.gradients}.items() if "step 0" in n} for r in (got, plain)
    ]
    result.equal = not unequal("", *first)
    for kind, values in exact.kinds().items():
        ours, theirs = got.kinds()[kind], plain.kinds()[kind]
        if ours.keys() != theirs.keys():
            result.wrong.append(f"{kind}: other names: {_named(sorted(ours.keys() ^ theirs.keys()))}")
        mine, its = errors_of(ours, values), errors_of(theirs, values)
        most, most_plain = max(mine.values(), default=0.0), max(its.values(), default=0.0)
        result.errors[kind] = most, most_plain
        if not most <= RATIO * most_plain + floor:
            worst = max(mine, key=lambda name: mine[name] - its[name])
            result.wrong.append(
                f"{kind}: error {most:.2e}, plain torch's {most_plain:.2e}; "
                f"{worst} has {mine[worst]:.2e}, plain torch's {its[worst]:.2e}"
            )


class Comparer:
    """Compares trainings with plain torch's, each of which is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[Any, Record] = {}
        self._initial: dict[Any, tuple[Values, Values, dict[str, str]]] = {}

    def _reference(
        self, family: Family, way: str, precision: Precision, start: Values, sent_back: torch.dtype | None
    ) -> Record:
        names = tuple((name, hash(value.float().numpy().tobytes())) for name, value in start.items())
        key = way, precision.dtype, precision.autocast, sent_back, names
        if key not in self._plain:
            model = built(family, way, self._folder)
            self._plain[key] = train_plain(model, family, precision, start, sent_back)
        return self._plain[key]

    def _initial_values(
        self, family: Family, way: str, precision: Precision
    ) -> tuple[Values, Values, dict[str, str]]:
        """Give a new model's parameters and buffers, and each parameter's first name by all its names."""
        key = way, precision.dtype
        if key not in self._initial:
            model = built(family, way, self._folder)
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
            first = {id(p): name for name, p in model.named_parameters()}
            aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
            round_buffers(model, family, precision)
            self._initial[key] = values, buffers_of(model), aliases
        return self._initial[key]

    def compare(self, cell: Cell, trained: Trained) -> Result:
        """Compare a cell with plain torch, and what was saved with what was trained."""
        family, precision = FAMILIES[cell.family], PRECISIONS[cell.precision]
        result = Result()
        way = "plain" if cell.way == "init" else cell.way
        values, buffers, aliases = self._initial_values(family, way, precision)
        dtypes = {name: value.dtype for name, value in trained.start.items()}
        # built sharded, parameters are in 16 bits from the beginning, and the masters start from those
        rounded = cell.stage == 3 and cell.way in ("init", "pretrained")
        first = {n: (v.to(precision.dtype) if rounded else v).to(dtypes.get(n)) for n, v in values.items()}
        started = trained.start
        if rounded and cell.way == "init" and precision.dtype.itemsize == 2:
            # a model's own code, called at the end of its constructor, draws and computes in 16 bits then
            started, first = _kinds_of(started), _kinds_of(first)
        result.wrong += unequal("initial values", started, first)
        result.wrong += unequal("initial buffers", trained.first_buffers, buffers)
        sent_back = precision.dtype if cell.stage == 0 else None
        plain = self._reference(family, way, precision, trained.start, sent_back)
        exact = self._reference(family, way, EXACT, trained.start, None)
        compare_errors(result, precision.floor, trained.record, plain, exact)
        ours = trained.record.buffers
        for rank in range(WORLD):
            result.wrong += unequal(
                f"buffers of rank {rank}", *map(_kinds_of, (ours[rank], plain.buffers[rank]))
            )
        if trained.record.names != plain.names:
            result.wrong.append(f"state dict: {sorted(set(trained.record.names) ^ set(plain.names))}")
        live = {n: v for n, v in trained.state.items() if n in trained.record.weights}
        masters = {n: v.to(precision.dtype) for n, v in trained.record.weights.items()}
        result.wrong += unequal("state dict beside masters", live, masters)
        result.wrong += unequal("save_16bit_model", trained.narrow, trained.state)
        wide: Values = {}
        for name, value in trained.state.items():
            master = trained.record.weights.get(aliases.get(name, name))  # tied weights have one master
            wide[name] = (
                value if not value.is_floating_point() else value.float() if master is None else master
            )
        result.wrong += unequal("converted checkpoint", trained.wide, wide)
        return result


def run_cells(cells: list[Cell], folder: Path, report: Callable[[Cell, Result], None]) -> None:
    """Run cells of one family in this rank; rank 0 reports each. Collective."""
    comparer = Comparer(folder)
    for cell in cells:
        torch.manual_seed(0)
        trained = train_engine(cell, folder)
        if dist.get_rank() == 0:
            report(cell, comparer.compare(cell, trained))
