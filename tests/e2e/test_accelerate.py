"""Test that accelerate, and the Trainer by it, know the other CPU workers of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.helpers import run

START = """
    import os
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    ZERO = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}

    def tell(what, state):
        sizes = f"{state.num_processes} {state.process_index} {state.is_main_process} {state.device.type}"
        print(what, str(state.distributed_type).partition(".")[2], sizes, flush=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
"""
ALONE = """
    from accelerate.utils import DeepSpeedPlugin

    accelerator = Accelerator()
    layer = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    layer(torch.full((1, 1), accelerator.process_index + 1.0)).sum().backward()
    print("gradient", next(layer.parameters()).grad.item(), flush=True)
    tell("plain", accelerator.state)
    tell("state", PartialState())
    tell("plugin", Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO)).state)
    torch.distributed.barrier()  # the first that fails ends the others
    PartialState.default_device = property(lambda self: torch.device("meta"))
    Accelerator()
"""
TRAINER = """
    from transformers.training_args import TrainingArguments

    tell("trainer", TrainingArguments("out", report_to="none").distributed_state)
    tell("plugin", TrainingArguments("out", report_to="none", deepspeed=ZERO).distributed_state)
"""
OPTIONS = ("--num_gpus", "2", "--no_local_rank", "--compat", "deepspeed")


@pytest.mark.exhaustive
def test_cpu_workers_are_one_run_or_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    """With DeepSpeed's plugin and without. At the end accelerate sees no CPU workers."""
    launch = run(tmp_path, *OPTIONS, script=START + ALONE)
    for rank in (0, 1):
        own, sizes = launch.log(rank), f"2 {rank} {rank == 0} cpu"
        assert "gradient 1.5" in own, own
        for line in (f"plain MULTI_CPU {sizes}", f"state MULTI_CPU {sizes}", f"plugin DEEPSPEED {sizes}"):
            assert line in own, (line, own)
    assert "accelerate treats this worker as a separate run, but it is one of 2" in launch.err
    assert launch.wait() == 1


@pytest.mark.exhaustive
def test_the_trainer_knows_the_other_workers_without_use_cpu(tmp_path: Path) -> None:
    launch = run(tmp_path, *OPTIONS, script=START + TRAINER)
    assert launch.wait() == 0, launch.err
    for rank in (0, 1):
        own, sizes = launch.log(rank), f"2 {rank} {rank == 0} cpu"
        assert f"trainer MULTI_CPU {sizes}" in own and f"plugin DEEPSPEED {sizes}" in own, own
