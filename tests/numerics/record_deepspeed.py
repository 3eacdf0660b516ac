"""Record DeepSpeed 0.19.8's errors in bf16, stages 1 to 3, in tests/data/numerics_deepspeed.json.

``PYTHONPATH=FOLDER python -m tests.numerics.record_deepspeed [FAMILY ...]``, where ``pip install --target
FOLDER deepspeed==0.19.8`` has put it. Families that aren't named keep their record.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.cell import (
    EXACT,
    PRECISIONS,
    STEPS,
    WORLD,
    Cell,
    Record,
    errors_of,
    settings,
    share,
    train_plain,
)
from tests.numerics.families import FAMILIES, build
from tests.numerics.page import RECORDED, read_deepspeed
from tests.runtime.workers import WorkerError, run_workers

VERSION = "0.19.8"
STAGES = (1, 2, 3)
PRECISION = PRECISIONS["bf16"]


def _train(name: str, stage: int) -> Record:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    if deepspeed.__version__ != VERSION:
        raise RuntimeError(f"DeepSpeed {deepspeed.__version__} is on the path, not {VERSION}")
    family = FAMILIES[name]
    config: dict[str, Any] = settings(Cell(name, "bf16", stage, "plain"))
    config["optimizer"]["params"]["torch_adam"] = True  # without compiling DeepSpeed's own
    engine, *_ = deepspeed.initialize(model=build(family), config=config)
    record = Record()
    for step in range(STEPS):
        batch = share(family.batch(step), dist.get_rank(), PRECISION.dtype)
        loss = family.loss(engine(**batch), batch)
        engine.backward(loss)
        for key, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = safe_get_full_grad(parameter)
                if gradient is not None:
                    record.gradients[f"step {step}: {key}"] = gradient.detach().float().clone()
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        record.losses.append(mean / WORLD)
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
            record.weights[key] = master.detach().float().clone()
    engine.destroy()
    return record


def work(name: str, stages: list[int]) -> dict[str, dict[str, float]]:
    """Return the errors of a family by stage and kind; those of rank 0 count."""
    import deepspeed

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's collectives need no compiler
        deepspeed.init_distributed("gloo", verbose=False)
        records = {stage: _train(name, stage) for stage in stages}
    if dist.get_rank():
        return {}
    family = FAMILIES[name]
    start = {key: p.detach().clone() for key, p in build(family).named_parameters()}
    exact = train_plain(build(family), family, EXACT, start)
    found: dict[str, dict[str, float]] = {}
    for stage, record in records.items():
        for key, value in exact.gradients.items():
            if not value.any():  # no gradient
                record.gradients.setdefault(key, torch.zeros_like(value))
        found[str(stage)] = {
            kind: float(f"{max(errors_of(record.kinds()[kind], values).values()):.3e}")
            for kind, values in exact.kinds().items()
            if kind != "buffers"
        }
    return found


def record_family(name: str) -> dict[str, dict[str, Any]]:
    """Run a family at all stages; where that fails, at each stage by itself."""
    env = {"DS_ACCELERATOR": "cpu"}
    try:
        return dict(run_workers(work, WORLD, name, list(STAGES), env=env)[0])
    except WorkerError:
        pass
    found: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        try:
            found |= run_workers(work, WORLD, name, [stage], env=env)[0]
        except WorkerError as error:
            lines = str(error).rstrip().splitlines()
            raised = [line for line in lines if line and not line[0].isspace() and ": " in line]
            found[str(stage)] = {"error": (raised or lines)[-1][:200]}
    return found


def main() -> None:
    """Record the named families, or all, one after the other."""
    recorded = read_deepspeed()
    for name in sys.argv[1:] or FAMILIES:
        recorded[name] = record_family(name)
        print(name, recorded[name], flush=True)
        kept = {family: recorded[family] for family in FAMILIES if family in recorded}
        RECORDED.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
