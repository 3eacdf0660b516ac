"""Compute when the gathers and reductions of a step would run on real GPUs, and what of them is exposed.

    python -m benchmarks.schedule [--model 70b] [--checkpoint] [--prefetch 50e6] [--offload nvme]

No GPU is used. Two ranks train a copy of the model whose matrices are 64 times narrower with the real hooks,
on the pretended GPU of `tests/pretend_gpu`. Each operation there gets the length that it would have in full
size: a collective by its bytes and a bandwidth, a copy by its bytes, a layer by its operations. The streams
and events of the runtime then decide when it begins. "FSDP2" is computed with the same lengths from the
order of torch 2.13's `fully_shard`, for a model whose layers, embedding, and norm with head are wrapped.

The lengths are assumptions (`Machine`), so compare systems and options with each other, not with a clock.
Left out: the loss, activations, kernel launches, disks, and contention between collectives and compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NARROWER = 64
"""Divides the width of the model that runs; its matrices have NARROWER ** 2 times fewer elements."""
RANKS = 2
"""Sets how many ranks run here. Collectives take the time that they take on all GPUs of the `Machine`."""
STEPS = 4
"""Counts the passes that find orders and settle sizes. The optimizer's step after them and one more pass are
measured.
"""
NORM_BYTES = 2
"""Bytes of a shard's element that the gradient's norm reads."""
ADAM_BYTES = 26
"""Bytes of an element that AdamW's kernel reads and writes: a gradient of 16 bits, and a master value and
two moments in fp32. FSDP2 has a fp32 gradient; its step is taken to be as long.
"""
LIMIT_S = 1200


@dataclass(frozen=True)
class Shape:
    """Describes a Llama in elements."""

    width: int
    inner: int
    keys: int
    """Width of keys and of values."""
    layers: int
    words: int
    tokens: int
    """Tokens of a rank's micro-batch, one sequence."""

    @property
    def layer_numel(self) -> int:
        return self.width * (2 * self.width + 2 * self.keys + 3 * self.inner + 2)

    @property
    def end_numel(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.words * self.width

    @property
    def numel(self) -> int:
        return self.layers * self.layer_numel + 2 * self.end_numel + self.width


@dataclass(frozen=True)
class Machine:
    """Describes what lengths are computed from: H100 with NVLink, and 400 Gbit/s a GPU between nodes."""

    ranks: int
    bus_bytes: float
    """Bytes per second that a rank receives in an all-gather."""
    memory_bytes: float = 2.8e12
    """Bytes per second of GPU memory."""
    host_bytes: float = 50e9
    """Bytes per second between a GPU and pinned memory of the host."""
    flops: float = 0.6e15
    """Operations per second that matrix products reach."""
    peak_flops: float = 0.989e15
    """Operations per second of which MFU is a share."""

    def collective(self, nbytes: float) -> int:
        """Return how long an all-gather or reduce-scatter of ``nbytes`` takes, in nanoseconds."""
        return round(1e9 * nbytes * (self.ranks - 1) / self.ranks / self.bus_bytes)

    def copy(self, nbytes: float) -> int:
        """Return how long a kernel takes to read and write ``nbytes`` of GPU memory, in nanoseconds."""
        return round(1e9 * nbytes / self.memory_bytes)

    def host_copy(self, nbytes: float) -> int:
        """Return how long a copy between GPU and host takes, in nanoseconds."""
        return round(1e9 * nbytes / self.host_bytes)

    def compute(self, flops: float) -> int:
        """Return how long matrix products of ``flops`` operations take, in nanoseconds."""
        return round(1e9 * flops / self.flops)


SHAPES = {
    "8b": (Shape(4096, 14336, 1024, 32, 128256, 8192), Machine(8, 370e9)),
    "70b": (Shape(8192, 28672, 1024, 80, 128256, 8192), Machine(64, 45e9 * 8)),
}


def layer_flops(shape: Shape) -> float:
    """Operations of a layer's forward pass, with causal attention."""
    return 2.0 * shape.layer_numel * shape.tokens + 2.0 * shape.tokens**2 * shape.width


def head_flops(shape: Shape) -> float:
    """Operations of the head's forward pass."""
    return 2.0 * shape.end_numel * shape.tokens


def model_flops(shape: Shape) -> float:
    """Operations of a pass forward and backward, without recomputation."""
    return 3 * (shape.layers * layer_flops(shape) + head_flops(shape))


def summarize(shape: Shape, machine: Machine, length: int, live: int) -> dict[str, Any]:
    """Summarize the timeline: milliseconds of the step, what of it the default stream waits for collectives,
    GiB of gathered parameters and gradient buckets at most, and MFU.
    """
    from tests.pretend_gpu.streams import DEFAULT
    from tests.pretend_gpu.timeline import timeline

    exposed = {"gather": 0, "reduce": 0}
    count = {"gather": 0, "reduce": 0}
    moved = {"gather": 0, "reduce": 0}
    for stall in timeline.stalls:
        if stall.actor == DEFAULT.actor:
            kind = "reduce" if "reduce" in stall.name else "gather"
            exposed[kind] += stall.stop - stall.start
            count[kind] += 1
    for span in timeline.work:
        if span.actor != DEFAULT.actor:
            moved["reduce" if "reduce" in span.name else "gather"] += span.stop - span.start
    return {
        "step_ms": length / 1e6,
        "exposed_gathers_ms": exposed["gather"] / 1e6,
        "exposed_reductions_ms": exposed["reduce"] / 1e6,
        "gathers_ms": moved["gather"] / 1e6,
        "reductions_ms": moved["reduce"] / 1e6,
        "waits_for_gathers": count["gather"],
        "waits_for_reductions": count["reduce"],
        "gathered_and_buckets_gib": live / 2**30,
        "mfu": model_flops(shape) / (length / 1e9) / machine.peak_flops,
    }


# -- zlaunch, by its own hooks


def _model(shape: Shape, machine: Machine) -> Any:
    """Make the narrow model. Each layer spends the time of the wide one on the current stream."""
    import torch
    from torch import nn

    from tests.pretend_gpu.streams import current_stream
    from tests.pretend_gpu.timeline import timeline

    class Spend(torch.autograd.Function):
        """Spends time in the forward pass, or in the backward pass. A layer spends the former before its
        products and the latter before theirs: a recomputation stops at the last tensor that it needs.
        """

        @staticmethod
        def forward(ctx: Any, value: Tensor, ahead: float, back: float) -> Tensor:
            ctx.back = back
            _spend("forward", ahead)
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            _spend("backward", ctx.back)
            return grad, None, None

    spend: Any = Spend.apply

    def _spend(name: str, flops: float) -> None:
        if timeline.cost is not None:
            timeline.spend(current_stream().actor, name, machine.compute(flops))

    width = shape.width // NARROWER
    inner = shape.inner // NARROWER
    keys = shape.keys // NARROWER

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(width, keys, bias=False)
            self.value = nn.Linear(width, keys, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.gate = nn.Linear(width, inner, bias=False)
            self.up = nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            flops = layer_flops(shape)
            hidden = spend(hidden, flops, 0.0)
            normed = hidden * self.norms[0]
            mixed = self.query(normed) + self.key(normed).sum() + self.value(normed).sum()
            hidden = hidden + self.out(mixed)
            normed = hidden * self.norms[1]
            hidden = hidden + self.down(self.gate(normed) * self.up(normed))
            return spend(hidden, 0.0, 2 * flops)

    class Head(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            flops = head_flops(shape)
            return spend(super().forward(spend(hidden, flops, 0.0)), 0.0, 2 * flops)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(shape.words // NARROWER, width)
            self.layers = nn.ModuleList(Layer() for _ in range(shape.layers))
            self.norm = nn.LayerNorm(width, bias=False)
            self.head = Head(width, shape.words // NARROWER, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(self.norm(hidden))

    torch.manual_seed(0)
    return Llama()


def _config(prefetch: float, max_live: float | None, offload: str | None) -> dict[str, Any]:
    """Return a config with these sizes and the defaults of others, in elements of the narrow model.

    ``offload``: where parameters are kept, "cpu" or "nvme".
    """
    matrices = NARROWER**2
    # the default limit never keeps a block from being gathered ahead
    limit = {} if max_live is None else {"stage3_max_live_parameters": int(max_live / matrices)}
    kept = {}
    if offload is not None:
        kept["offload_param"] = {"device": offload, "nvme_path": tempfile.gettempdir(), "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": int(prefetch / matrices),
            **limit,
            **kept,
            "stage3_param_persistence_threshold": int(1e5 / NARROWER),  # vectors, such as a norm's weight
        },
        "steps_per_print": 1000,
    }


def run_rank(
    name: str, prefetch: float, max_live: float | None, *, checkpoint: bool, offload: str | None
) -> dict[str, Any]:
    """Train as one of the ranks, and return the summary of the last step of the optimizer and a pass."""
    from tests.pretend_gpu import device

    device.install()

    import torch

    import zlaunch
    from tests.pretend_gpu.memory import allocated, is_on_device, without_modes
    from tests.pretend_gpu.modes import running
    from tests.pretend_gpu.streams import DEFAULT, current_stream
    from tests.pretend_gpu.timeline import timeline
    from zlaunch.cuda_ops import step as optimizer_steps
    from zlaunch.runtime import build
    from zlaunch.runtime.zero import store

    shape, machine = SHAPES[name]
    scale = NARROWER**2

    def timed(module: Any, function: str, name: str, nbytes: int) -> None:
        """Let a function take the time of its kernel; operations of plain torch inside of it take none."""
        run = getattr(module, function)

        def call(given: Any, *arguments: Any) -> Any:
            cost = timeline.cost
            timeline.cost = None
            result = run(given, *arguments)
            timeline.cost = cost
            if cost is not None:
                numel = sum(tensor.numel() for tensor in (given if isinstance(given, list) else [given]))
                length = machine.copy(scale * nbytes * numel * RANKS / machine.ranks)
                timeline.spend(current_stream().actor, name, length)
            return result

        setattr(module, function, call)

    timed(store, "sums_of_squares", "norm", NORM_BYTES)
    timed(optimizer_steps, "adam_step", "step", ADAM_BYTES)
    plain: Any = build.ShardingOptions
    # a norm of the wide model is a block
    build.ShardingOptions = lambda **options: plain(**{**options, "minimum_numel": NARROWER // 2})  # type: ignore[assignment, misc]
    shards: set[int] = set()
    most = 0

    def cost(operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        nonlocal most
        most = max(most, allocated())
        with without_modes():
            read = sum(tensor.numel() * tensor.element_size() for tensor in reads)
            written = sum(tensor.numel() * tensor.element_size() for tensor in writes)
        if operation.startswith("all_gather"):
            return machine.collective(scale * written)
        if operation.startswith("reduce_scatter"):
            return machine.collective(scale * read)
        if operation.startswith("all_reduce"):
            return 2 * machine.collective(scale * written)
        if operation not in _MOVES:  # the layers spend the time of products
            return 0
        if not all(map(is_on_device, (*reads, *writes))):
            return machine.host_copy(scale * written * RANKS / machine.ranks)
        is_shard = any(tensor.numel() in shards for tensor in writes)
        return machine.copy(scale * (read + written) * (RANKS / machine.ranks if is_shard else 1))

    with running():
        place = zlaunch.init_distributed()
        model = _model(shape, machine)
        if checkpoint:
            zlaunch.checkpointing.checkpoint_blocks(model)
        engine, *_ = zlaunch.initialize(model=model, config=_config(prefetch, max_live, offload))
        shards |= {unit.numel // RANKS for unit in engine.units}
        tokens = torch.zeros(1, 2, dtype=torch.int64).to(place)
        for step in range(STEPS + 1):
            loss = engine(tokens).float().mean()
            engine.backward(loss)
            end = timeline.now(DEFAULT.actor)
            timeline.cost = None
            if step == STEPS - 1:
                torch.cuda.synchronize()
                before = allocated()
                begin = timeline.now(DEFAULT.actor)
                timeline.begin(cost)
            engine.step()
        engine.destroy()
    return summarize(shape, machine, end - begin, scale * (most - before))


_MOVES = frozenset(f"aten::{name}" for name in ("copy_", "_to_copy", "add_", "mul_", "add", "zero_", "fill_"))
"""Names operations on gradients and parameters that move memory."""


# -- FSDP2, by its documented order


def run_fsdp2(name: str, *, checkpoint: bool) -> dict[str, Any]:
    """Lay out a step in FSDP2's order, and return its summary."""
    from tests.pretend_gpu.streams import DEFAULT, Event, Stream
    from tests.pretend_gpu.timeline import timeline

    shape, machine = SHAPES[name]
    numels = [shape.end_numel, *[shape.layer_numel] * shape.layers, shape.end_numel + shape.width]
    flops = [0.0, *[layer_flops(shape)] * shape.layers, head_flops(shape)]
    last = len(numels) - 1
    gather = Stream()
    reduce = Stream()
    gathered: dict[int, Event] = {}
    copied = Event()
    live = most = 0
    timeline.begin(lambda *_: 0)
    for kernel, nbytes in (("norm", NORM_BYTES), ("step", ADAM_BYTES)):
        timeline.spend(DEFAULT.actor, kernel, machine.copy(nbytes * shape.numel / machine.ranks))
    gather.wait_stream(DEFAULT)

    def start(index: int) -> None:
        # the memory of the gather before is used again: once its values have been copied out
        gather.wait_event(copied)
        timeline.spend(gather.actor, "all_gather", machine.collective(2 * numels[index]))
        gathered[index] = gather.record_event()

    def use(index: int) -> None:
        nonlocal copied, live, most
        if index in gathered:
            DEFAULT.wait_event(gathered.pop(index))
            timeline.spend(DEFAULT.actor, "copy out", machine.copy(2 * 2 * numels[index]))
            copied = DEFAULT.record_event()
            live += 2 * numels[index]
        most = max(most, live + sum(2 * numels[each] for each in gathered))

    for index in range(len(numels)):
        # The host is ahead: the next gather is queued before this block's compute, and waits for the copy
        # of this one's values.
        if index not in gathered:
            start(index)
        use(index)
        if index < last:
            start(index + 1)
        timeline.spend(DEFAULT.actor, "forward", machine.compute(flops[index]))
        if index < last:  # the last block's parameters are kept for the backward pass
            live -= 2 * numels[index]
    for index in reversed(range(len(numels))):
        if index not in gathered and index != last:
            start(index)
        use(index)
        if index:
            start(index - 1)
        times = 3 if checkpoint and 0 < index < last else 2
        timeline.spend(DEFAULT.actor, "backward", machine.compute(times * flops[index]))
        live -= 2 * numels[index]
        # in bf16, as the gradients are: the reduce_dtype of its mixed precision
        timeline.spend(DEFAULT.actor, "copy in", machine.copy(2 * 2 * numels[index]))
        most = max(most, live + 2 * 2 * numels[index] + sum(2 * numels[each] for each in gathered))
        reduce.wait_stream(DEFAULT)
        timeline.spend(reduce.actor, "reduce_scatter", machine.collective(2 * numels[index]))
    DEFAULT.wait_stream(reduce)
    return summarize(shape, machine, timeline.now(DEFAULT.actor), most)


# -- the command


def _zlaunch() -> dict[str, Any]:
    """Run the ranks with this command's options, and return what rank 0 has found."""
    from tests.pretend_gpu.ranks import Ranks

    with Ranks() as ranks:
        arguments = ["--as_rank", *sys.argv[1:]]
        codes, said = ranks.run("benchmarks.schedule", arguments, world=RANKS, limit_s=LIMIT_S)
    if any(codes):
        raise SystemExit("\n".join(said))
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--prefetch", type=float, default=50e6, help="stage3_prefetch_bucket_size")
    parser.add_argument("--max_live", type=float, help="stage3_max_live_parameters")
    parser.add_argument("--checkpoint", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--offload", choices=("cpu", "nvme"), help="where offload_param keeps parameters")
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--as_rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        found = run_rank(
            options.model,
            options.prefetch,
            options.max_live,
            checkpoint=options.checkpoint,
            offload=options.offload,
        )
        print(json.dumps(found), flush=True)
        os._exit(0)  # threads of the pretended GPU
    shape, machine = SHAPES[options.model]
    results = {"zlaunch": _zlaunch(), "FSDP2": run_fsdp2(options.model, checkpoint=options.checkpoint)}
    about = {key: getattr(options, key) for key in ("model", "prefetch", "max_live", "checkpoint", "offload")}
    print(f"{options.model}: {shape.numel / 1e9:.2f}e9 parameters on {machine.ranks} GPUs")
    for key in results["zlaunch"]:
        row = "".join(f"{results[system][key]:12.3f}" for system in results)
        print(f"{key:26}{row}")
    if options.out is not None:
        command = " ".join(["python -m benchmarks.schedule", *sys.argv[1:]])
        whole = {
            "command": command,
            **about,
            "shape": asdict(shape),
            "machine": asdict(machine),
            "results": results,
        }
        options.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
