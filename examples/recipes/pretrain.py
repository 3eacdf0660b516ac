"""Pretrain on packed documents with your own loop: a dense model, a mixture of experts, or long contexts.

cd examples/recipes
zlaunch --num_gpus 8 pretrain.py --config pretrain_7b.json
zlaunch --num_gpus 8 pretrain.py --config moe.json --model models/moe-8x7b
zlaunch --num_gpus 8 pretrain.py --config long_context.json --length 131072
"""

from __future__ import annotations

import argparse
from itertools import chain, repeat
from pathlib import Path

import torch
from recipe import TINY_LENGTH, TINY_STEPS, PackedText, architecture, documents
from transformers import AutoModelForCausalLM

import zlaunch

HERE = Path(__file__).parent


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(HERE / "models/llama-7b"), help="folder with a config.json")
    parser.add_argument("--data", help="folder of .txt, .md or .py files")
    parser.add_argument("--length", type=int, default=4096, help="tokens per row")
    parser.add_argument("--rows", type=int, default=4096, help="rows of the training set")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoints", help="directory for checkpoints; a run resumes from the latest one")
    parser.add_argument("--save_every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--tiny", action="store_true", help="train a tiny model for a few steps, also on CPU")
    zlaunch.add_config_arguments(parser)
    args = parser.parse_args()
    if args.tiny:
        args.length = TINY_LENGTH
        args.rows = 64
        args.steps = TINY_STEPS

    torch.manual_seed(0)
    with zlaunch.zero.Init(config=args.deepspeed_config):  # at stage 3 no rank ever holds the whole model
        model = AutoModelForCausalLM.from_config(architecture(args.model, tiny=args.tiny))
    text = PackedText(documents(args.model, args.data, tiny=args.tiny), args.length, args.rows)
    engine, _, loader, _ = zlaunch.initialize(args=args, model=model, training_data=text)
    assert loader is not None
    if args.checkpoints:
        engine.load_checkpoint(zlaunch.resume_dir(args.checkpoints))

    batches = chain.from_iterable(repeat(loader))
    while engine.global_steps < args.steps:
        for _ in range(engine.accumulation_steps):
            batch = {name: value.to(engine.device) for name, value in next(batches).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        zlaunch.report(step=engine.global_steps, steps=args.steps, loss=loss.item())
        if args.checkpoints and engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.checkpoints)
    if engine.global_rank == 0:
        print(f"loss {loss.item():.4f} after {engine.global_steps} steps", flush=True)


if __name__ == "__main__":
    main()
