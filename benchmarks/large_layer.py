"""Train one huge layer in tiles with everything on disk, under a limit of the process's address space.

    python -m benchmarks.large_layer --path FOLDER [--width 16384] [--inner 40960] [--tile 34e6]

The model is one layer of a transformer (grouped attention and a gated MLP) in fp32 between a small embedding
and a small head. Its large linear layers are ``zlaunch.zero.TiledLinear`` of tiles of up to ``--tile``
elements. It prints a line of JSON: the layer's parameters, the bytes of the memory plan (device and host; in
this process both are host memory), the peaks of memory and of address space, and the seconds of each step. By
default the layer has 2.6 billion parameters, and FOLDER needs 52 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from benchmarks.offload import memory_bytes

HEADS = 8
"""Counts the heads of queries; there is one head of keys and values."""
WORDS = 64


def build(width: int, inner: int, tile: int) -> Any:
    """Return the model, which takes token numbers (batch, length) and returns its loss."""
    from torch import Tensor, nn
    from torch.nn import functional

    from zlaunch.zero import TiledLinear

    def linear(in_features: int, out_features: int) -> nn.Module:
        tiles = -(-in_features * out_features // tile)
        return TiledLinear(in_features, out_features, bias=False, out_splits=tiles)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention = nn.LayerNorm(width)
            self.query = linear(width, width)
            self.key = linear(width, width // HEADS)
            self.value = linear(width, width // HEADS)
            self.out = linear(width, width)
            self.before_mlp = nn.LayerNorm(width)
            self.gate = linear(width, inner)
            self.up = linear(width, inner)
            self.down = linear(inner, width)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.before_attention(x)
            query = self.query(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            key = self.key(normed).unsqueeze(1).expand_as(query)
            value = self.value(normed).unsqueeze(1).expand_as(query)
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(-2))
            normed = self.before_mlp(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, width)
            self.layers = nn.ModuleList([Layer()])
            self.head = nn.Linear(width, WORDS, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Model()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", required=True, help="folder on the disk for state and parameters")
    parser.add_argument("--width", type=int, default=16384)
    parser.add_argument("--inner", type=int, default=40960)
    parser.add_argument("--tile", type=float, default=34e6, help="most elements of a tile")
    parser.add_argument(
        "--limit_gb", type=float, default=6.0, help="limit of the address space in GiB; 0: none"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    import torch

    import zlaunch
    from zlaunch.runtime import build as runtime_build
    from zlaunch.runtime.memory.estimate import plan

    if args.limit_gb:
        limit = round(args.limit_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    place = {"device": "nvme", "nvme_path": args.path}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "stage3_unit_size": round(args.tile),
            "stage3_prefetch_bucket_size": 1,
            "sub_group_size": 1 << 22,
            "offload_optimizer": place,
            "offload_param": {**place, "max_in_cpu": 0},
        },
    }
    torch.manual_seed(0)
    zlaunch.init_distributed()
    before = memory_bytes("VmRSS")
    with zlaunch.zero.Init(config=config):
        model = build(args.width, args.inner, round(args.tile))
    numel = sum(parameter.numel() for parameter in model.layers.parameters())
    settings = []
    preflight = runtime_build.preflight

    def noted(*given: Any, **more: Any) -> Any:
        found = preflight(*given, **more)
        settings.append(found[0])
        return found

    runtime_build.preflight = noted
    engine, *_ = zlaunch.initialize(model=model, config=config)
    seconds = []
    losses = []
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, WORDS, (1, args.tokens), generator=generator)
        started = time.perf_counter()
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        seconds.append(round(time.perf_counter() - started, 1))
        losses.append(round(loss.item(), 4))
    planned = plan(settings[0]).total
    print(
        json.dumps(
            {
                "layer_parameters": numel,
                "planned_gb": round((planned.device + planned.host) / 2**30, 2),
                "grown_gb": round((memory_bytes("VmHWM") - before) / 2**30, 2),
                "peak_gb": round(memory_bytes("VmHWM") / 2**30, 2),
                "address_gb": round(memory_bytes("VmPeak") / 2**30, 2),
                "step_s": seconds,
                "losses": losses,
            }
        ),
        flush=True,
    )
    # engine.destroy() would need memory for the whole model


if __name__ == "__main__":
    main()
