"""Compute what collectives of tensor parallelism a pass forward and backward exposes on real GPUs.

    python -m benchmarks.tensor_schedule [--model 70b] [--sequence_parallel]

No GPU is used. Two ranks train a narrow Llama on the pretended GPU, as in `benchmarks.schedule`. Each
operation gets the length that it would have in the full model, where `--ranks` GPUs of one node share each
layer: products and attention by their operations, collectives by their bytes. "overlapped" is the runtime as
it is. "at once" is the runtime without Note [Sums beside weight gradients] in runtime/parallel/columns.py.

The lengths are assumptions (`Machine`), so compare the columns with each other, not with a clock. Left out:
norms and other operations that move memory, the head and the loss, the optimizer, kernel launches, and
contention between collectives and compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .schedule import LIMIT_S, NARROWER, SHAPES, Shape, layer_flops

if TYPE_CHECKING:
    from torch import Tensor

RANKS = 2
"""Sets how many ranks run here."""
TOKENS = 8
"""Sets how many tokens run here."""
HEAD = 2
"""Sets the width of a head here, as narrow as rotary embeddings can be."""
WORDS = 26
"""Sets the size of the vocabulary here. No other dimension has it, or half of it."""
PASSES = 6
"""Counts the passes, of which the last is measured: the first ones are watched."""


def _model(shape: Shape) -> Any:
    """Make the narrow model."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    width = shape.width // NARROWER
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=shape.inner // NARROWER,
        num_hidden_layers=shape.layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=shape.keys // NARROWER // HEAD,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def run_rank(shape: Shape, ranks: int, *, tokens_divided: bool, overlapped: bool) -> dict[str, Any]:
    """Train as one of the ranks, and return the summary of a pass."""
    from tests.pretend_gpu import device

    device.install()

    import torch

    import zlaunch
    from tests.pretend_gpu.modes import running
    from tests.pretend_gpu.streams import DEFAULT
    from tests.pretend_gpu.timeline import timeline
    from zlaunch.runtime.parallel import forwards, token_shards

    if not overlapped:
        for module in (forwards, token_shards):
            module.sums_early = lambda value: False  # type: ignore[attr-defined]
    machine = replace(SHAPES["8b"][1], ranks=ranks)
    share = RANKS / ranks
    more_tokens = shape.tokens / TOKENS

    def cost(operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        if operation in ("aten::mm", "aten::addmm"):
            one, other = reads[-2:]
            flops = 2 * one.shape[0] * one.shape[1] * other.shape[1]
            if {WORDS, WORDS // RANKS} & {*one.shape, *other.shape}:  # of the head
                return 0
            return machine.compute(flops * more_tokens * NARROWER**2 * share)
        if operation == "aten::bmm":  # attention, which is causal
            one, other = reads
            flops = 2 * one.shape[0] * one.shape[1] * one.shape[2] * other.shape[2]
            return machine.compute(flops / 2 * more_tokens**2 * NARROWER * share)
        numel = sum(tensor.numel() for tensor in writes)
        nbytes = 2 * numel * more_tokens * NARROWER
        if operation.startswith("all_gather"):
            return machine.collective(nbytes)
        if operation.startswith("reduce_scatter"):
            return machine.collective(nbytes * RANKS)
        if operation.startswith("all_reduce") and numel >= TOKENS * shape.width // NARROWER:
            return 2 * machine.collective(nbytes)
        return 0

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "parallel": {"tensor": RANKS},
        "tensor_parallel": {"sequence_parallel": tokens_divided},
        "steps_per_print": 1000,
    }
    with running():
        place = zlaunch.init_distributed()
        engine, *_ = zlaunch.initialize(model=_model(shape), config=config)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64).to(place)
        for index in range(PASSES):
            torch.cuda.synchronize()
            begin = timeline.now(DEFAULT.actor)
            if index == PASSES - 1:
                timeline.begin(cost)
            engine.backward(engine(input_ids=tokens).logits.float().mean())
            torch.cuda.synchronize()
            end = timeline.now(DEFAULT.actor)
            timeline.cost = None
            engine.step()
        engine.destroy()
    stalls = [stall for stall in timeline.stalls if stall.actor == DEFAULT.actor]
    moved = [span for span in timeline.work if span.actor != DEFAULT.actor]
    flops = 3 * shape.layers * layer_flops(shape)
    return {
        "pass_ms": (end - begin) / 1e6,
        "exposed_ms": sum(stall.stop - stall.start for stall in stalls) / 1e6,
        "collectives_ms": sum(span.stop - span.start for span in moved) / 1e6,
        "waits": len(stalls),
        "mfu": flops / ranks / ((end - begin) / 1e9) / machine.peak_flops,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="layers of the model; by default all")
    parser.add_argument("--ranks", type=int, default=8, help="GPUs that share each layer")
    parser.add_argument("--sequence_parallel", action="store_true", help="divide the tokens between layers")
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--as_rank", choices=("overlapped", "at_once"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape, _ = SHAPES[options.model]
    if options.layers is not None:
        shape = replace(shape, layers=options.layers)
    if options.as_rank:
        found = run_rank(
            shape,
            options.ranks,
            tokens_divided=options.sequence_parallel,
            overlapped=options.as_rank == "overlapped",
        )
        print(json.dumps(found), flush=True)
        os._exit(0)  # threads of the pretended GPU
    from tests.pretend_gpu.ranks import Ranks

    results = {}
    with Ranks() as ranks:
        for system in ("overlapped", "at_once"):
            arguments = ["--as_rank", system, *sys.argv[1:]]
            codes, said = ranks.run("benchmarks.tensor_schedule", arguments, world=RANKS, limit_s=LIMIT_S)
            if any(codes):
                raise SystemExit("\n".join(said))
            results[system] = json.loads(said[0].splitlines()[-1])
    print(f"{options.model}: {shape.layers} layers, each shared by {options.ranks} GPUs; overlapped, at once")
    for key in results["overlapped"]:
        print(f"{key:16}" + "".join(f"{row[key]:12.3f}" for row in results.values()))
    if options.out is not None:
        options.out.write_text(json.dumps({"command": sys.argv[1:], "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
