"""Train a byte-level GPT on the Python standard library.

zlaunch --num_gpus 2 examples/train_gpt.py --config examples/ds_stage2.json
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, load_text, sample_batch
from torch import Tensor
from torch.nn import functional as F

import zlaunch
from zlaunch.sequence import attention, mean, split


def memory_gb() -> float:
    """Return the peak memory of this rank: of the GPU if it trains on one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def mean_loss(engine: zlaunch.Engine, text: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of predicting each byte of ``text`` (batch, time + 1).

    Ranks that share sequences (``parallel.sequence``) compute a part of the time each.
    """
    positions = split(torch.arange(text.shape[1] - 1, device=text.device), dim=0)
    logits = engine(split(text[:, :-1]), positions)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), split(text[:, 1:]).flatten(), reduction="none")
    return mean(losses)


@torch.no_grad()
def validate(engine: zlaunch.Engine, text: torch.Tensor, context: int, batches: int = 8) -> float:
    """Return the mean loss over fixed windows, divided over the ranks."""
    engine.eval()
    generator = torch.Generator().manual_seed(99 + engine.data_parallel_rank)
    losses = [
        mean_loss(engine, sample_batch(text, 8, context, generator).to(engine.device)).float()
        for _ in range(batches)
    ]
    engine.train()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return total.item() / engine.world_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=10, help="steps between reports")
    parser.add_argument("--save", help="directory for the trained weights")
    parser.add_argument("--checkpoints", help="directory for checkpoints; a run resumes from the latest one")
    parser.add_argument("--save_every", type=int, default=50, help="steps between checkpoints")
    zlaunch.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    size = SIZES[args.size]
    engine, *_ = zlaunch.initialize(args=args, model=GPT(size, attention=attention))
    train, validation = load_text()
    generator = torch.Generator()

    engine.load_checkpoint(zlaunch.resume_dir(args.checkpoints))
    begin = engine.global_steps

    first = validate(engine, validation, size.context)
    started, step_started = time.perf_counter(), begin
    for step in range(begin + 1, args.steps + 1):
        # a step's batches depend on the step and the samples' rank alone: a run goes on in any layout
        generator.manual_seed(step * engine.data_parallel_size + engine.data_parallel_rank)
        for _ in range(engine.accumulation_steps):
            batch = sample_batch(train, engine.micro_batch_size, size.context, generator).to(engine.device)
            loss = mean_loss(engine, batch)
            engine.backward(loss)
            engine.step()
        if step % args.every == 0 or step == args.steps:
            now = time.perf_counter()
            tokens = (step - step_started) * engine.global_batch_size * size.context
            zlaunch.report(
                step=step,
                steps=args.steps,
                loss=loss.item(),
                lr=engine.get_lr()[0],
                loss_scale=engine.loss_scale,
                grad_norm=engine.grad_norm,
                tokens_per_s=tokens / (now - started),
                memory_gb=memory_gb(),
            )
            started, step_started = now, step
        if args.checkpoints and step % args.save_every == 0:
            engine.save_checkpoint(args.checkpoints)
    last = validate(engine, validation, size.context)
    if engine.global_rank == 0:
        print(f"validation loss {first:.3f} -> {last:.3f}", flush=True)
    if args.save:
        engine.save_16bit_model(args.save)


if __name__ == "__main__":
    main()
