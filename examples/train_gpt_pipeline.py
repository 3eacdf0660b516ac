"""Train a byte-level GPT with pipeline parallelism.

zlaunch --num_gpus 2 examples/train_gpt_pipeline.py --config examples/ds_pipeline.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from gpt import GPT, SIZES, load_text, sample_batch
from torch import Tensor
from torch.nn import functional as F

import zlaunch


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of predicting each byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", help="directory for checkpoints; a run resumes from the latest one")
    zlaunch.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    size = SIZES[args.size]
    engine, *_ = zlaunch.initialize(args=args, model=GPT(size))
    train, validation = load_text()

    def micro_batches(text: Tensor, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and labels, the same on all stages of a pipeline."""
        generator = torch.Generator().manual_seed(
            seed * engine.data_parallel_size + engine.data_parallel_rank
        )
        for _ in range(count):
            batch = sample_batch(text, engine.micro_batch_size, size.context, generator).to(engine.device)
            yield batch[:, :-1], batch[:, 1:]

    engine.load_checkpoint(zlaunch.resume_dir(args.checkpoints))
    first = engine.eval_batch(micro_batches(validation, 0, 16), loss_of, num_micro_batches=16).item()
    for step in range(engine.global_steps + 1, args.steps + 1):
        loss = engine.train_batch(micro_batches(train, step, engine.accumulation_steps), loss_of)
        if step % 10 == 0 or step == args.steps:
            zlaunch.report(step=step, steps=args.steps, loss=loss.item(), lr=engine.get_lr()[0])
        if args.checkpoints and step % 50 == 0:
            engine.save_checkpoint(args.checkpoints)
    last = engine.eval_batch(micro_batches(validation, 0, 16), loss_of, num_micro_batches=16).item()
    if engine.global_rank == 0:
        print(f"validation loss {first:.3f} -> {last:.3f}", flush=True)


if __name__ == "__main__":
    main()
