"""Test the snippets of DeepSpeed's and Transformers' guides, as those write them, on small models."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.limits import LIMIT_S
from tests.ports import reserved_port
from tests.runtime.workers import run_workers
from zlaunch.compat.deepspeed.estimate import estimate_zero3_model_states_mem_needs
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}


def _deepspeed() -> Any:
    import zlaunch.compat.deepspeed

    zlaunch.compat.deepspeed.install()
    import deepspeed

    return deepspeed


def _layers(width: int = 96) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def _data(count: int, width: int = 96) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(2)
    rows = [torch.randn(width, generator=chance) for _ in range(count)]
    return [(row, row[:1]) for row in rows]


def _getting_started(folder: str) -> list[float]:
    """initialize from arguments, the loop, checkpoints with the script's own step."""
    deepspeed = _deepspeed()
    path = Path(folder, f"ds_{os.environ['RANK']}.json")
    path.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}')
    parser = argparse.ArgumentParser(description="My training script.")
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="local rank passed from distributed launcher"
    )
    parser = deepspeed.add_config_arguments(parser)
    local = f"--local_rank={os.environ['LOCAL_RANK']}"
    cmd_args = parser.parse_args([local, "--deepspeed", "--deepspeed_config", str(path)])

    net = _layers()
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=cmd_args, model=net, model_parameters=net.parameters(), training_data=_data(32)
    )
    assert model_engine.local_rank == cmd_args.local_rank and model_engine.train_batch_size() == 8
    losses = []
    for step, (inputs, labels) in enumerate(deepspeed.utils.RepeatingLoader(trainloader)):
        loss = (model_engine(inputs.to(model_engine.device)) - labels).square().mean()
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
        if step == 3:
            model_engine.save_checkpoint(folder, f"step{step}", client_state={"step": step})
        if step == 9:
            break
    _, client_sd = model_engine.load_checkpoint(folder, "step3")
    assert client_sd["step"] == 3 and model_engine.global_steps == 4
    nothing = str(Path(folder, "nothing"))
    assert model_engine.load_checkpoint(nothing, missing_ok=True) == (None, None)
    with pytest.raises(CheckpointError, match="nothing: no such folder"):
        model_engine.load_checkpoint(nothing)
    return losses


def test_getting_started(tmp_path: Path) -> None:
    losses = run_workers(_getting_started, 2, str(tmp_path))[0]
    assert len(losses) == 10 and losses[-1] < losses[2]


def _sharded_construction() -> list[Any]:
    """zero.Init and GatheredParameters."""
    deepspeed = _deepspeed()
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from transformers import T5Config, T5ForConditionalGeneration

    with deepspeed.zero.Init():
        config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        model = T5ForConditionalGeneration(config)
    parameter: Any = model.shared.weight
    assert parameter.dtype == torch.float16 and parameter.shape == torch.Size([0])
    assert parameter.ds_shape == torch.Size([64, 32]) and parameter.ds_numel == 2048

    def maybe_zero_3(param: Any) -> torch.Tensor:  # as LLaVA's scripts have it
        if hasattr(param, "ds_id"):
            assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
            with deepspeed.zero.GatheredParameters([param]):
                return param.data.detach().cpu().clone()
        return param.detach().cpu().clone()

    assert maybe_zero_3(parameter).shape == (64, 32)

    class Reset(nn.Module):
        """Initializes a child that is sharded already, by its shapes, as transformers does SigLIP's."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.attention._reset_parameters()

    with deepspeed.zero.Init(config_dict_or_path={**BASE, "zero_optimization": {"stage": 3}}):
        reset = Reset()
    assert reset.attention.in_proj_weight.shape == torch.Size([0])

    with deepspeed.zero.Init(config_dict_or_path={**BASE, "zero_optimization": {"stage": 3}}):
        embedding: Any = nn.Embedding(50, 16)
    with deepspeed.zero.GatheredParameters(embedding.weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            nn.init.constant_(embedding.weight, 0.25)
    # inside another, twice the same, nothing, a plain tensor: none is an error
    with (
        deepspeed.zero.GatheredParameters([embedding.weight, embedding.weight, torch.zeros(3)]),
        deepspeed.zero.GatheredParameters(embedding.weight),
    ):
        values = embedding.weight.detach().clone()
    with deepspeed.zero.GatheredParameters([]):
        pass
    assert embedding.weight.numel() == 0
    deepspeed.zero.register_external_parameter(embedding, embedding.weight)
    embedding.weight.all_gather()
    assert embedding.weight.shape == (50, 16)
    embedding.weight.partition()
    assert embedding.weight.numel() == 0 and embedding.weight.partition_numel() == 400
    with deepspeed.zero.Init(enabled=False):
        assert nn.Linear(3, 3).weight.numel() == 9
    return [float(values.min()), float(values.max()), hasattr(torch.nn.Parameter(torch.zeros(1)), "ds_id")]


def test_sharded_construction() -> None:
    assert run_workers(_sharded_construction, 2) == [[0.25, 0.25, False]] * 2


def _weights_out(folder: str) -> list[bool]:
    """zero_to_fp32 as a script, and as two functions."""
    deepspeed = _deepspeed()
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    model = _layers()
    engine, *_ = deepspeed.initialize(model=model, config={**BASE, "zero_optimization": {"stage": 3}})
    inputs, labels = torch.stack([row for row, _ in _data(4)]), torch.zeros(4, 1)
    engine.backward((engine(inputs) - labels).square().mean())
    engine.step()
    checkpoint_dir = str(Path(folder, "checkpoint"))
    engine.save_checkpoint(checkpoint_dir)
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (engine.global_rank != 0)
    engine.destroy()
    if whole is None:
        return []
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir)
    loaded = load_state_dict_from_zero_checkpoint(_layers(), checkpoint_dir).state_dict()
    subprocess.run(
        [sys.executable, "zero_to_fp32.py", ".", "out"],
        cwd=checkpoint_dir,
        check=True,
        capture_output=True,
    )
    written = torch.load(Path(checkpoint_dir, "out", "pytorch_model.bin"), weights_only=True)
    return [
        all(torch.equal(value, other[name]) for name, value in whole.items())
        for other in (state_dict, loaded, written)
    ]


@pytest.mark.exhaustive
def test_weights_out(tmp_path: Path) -> None:
    assert run_workers(_weights_out, 2, str(tmp_path))[0] == [True] * 3


def _estimates() -> list[Any]:
    deepspeed = _deepspeed()
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as live3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live as live2

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        live2(_layers(), num_gpus_per_node=2, num_nodes=1)
        live3(_layers(), num_gpus_per_node=2, num_nodes=1)
    zero = deepspeed.zero
    return [
        text.getvalue().count("offload_optimizer"),
        zero.estimate_zero2_model_states_mem_needs(2_851_000_000, 8, 1, False),
        zero.estimate_zero2_model_states_mem_needs(2_851_000_000, 8, 1, True),
        zero.estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 1, True, True, True),
        zero.estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 1, True, False, False),
        zero.estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 2, False, False, True),
    ]


def test_estimates() -> None:
    """The numbers are those that DeepSpeed 0.19.8 gives for a model of the size of T5-3b."""
    lines, *numbers = run_workers(_estimates, 1)[0]
    assert lines == 8
    assert numbers == [
        (136848000000, 12116750000),
        (136848000000, 5702000000),
        (76977000000, 128000000, 128000000),
        (136848000000, 840750000, 128000000),
        (1536000000, 3335375000, 128000000),
    ]


NOTEBOOK = """
import os
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
import zlaunch.compat.deepspeed as ds
ds.install()
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments
training_args = TrainingArguments(
    "{folder}", deepspeed=dict(train_batch_size="auto", zero_optimization=dict(stage=3)),
    max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, save_strategy="no",
)
sizes = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
model = AutoModelForCausalLM.from_config(GPT2Config(**sizes))
rows = [dict(input_ids=[1, 2, 3, 4], labels=[1, 2, 3, 4])] * 8
trainer = Trainer(model, training_args, train_dataset=rows)
trainer.train()
print("loss", trainer.state.log_history[-1]["train_loss"] > 0)
"""


@pytest.mark.exhaustive
def test_notebook_without_a_launcher(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    with reserved_port() as port:
        result = subprocess.run(
            [sys.executable, "-c", NOTEBOOK.format(port=port, folder=tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert "loss True" in result.stdout, result.stderr[-2000:]


def test_the_published_table_of_t0_3b() -> None:
    """GB of host memory and of a GPU for T0_3B on one GPU, as the guides print them."""
    total, largest = 2_783_959_040, 32128 * 2048
    found = [
        estimate_zero3_model_states_mem_needs(
            total, largest, cpu_offload=optimizer, cpu_offload_params=parameters, zero_init=zero_init
        )
        for parameters, optimizer, zero_init in (
            *((True, True, True), (True, True, False), (False, True, True), (False, True, False)),
            *((False, False, True), (False, False, False)),
        )
    ]
    rounded = [(round(host / 2**30, 2), round(device / 2**30, 2)) for host, device, _ in found]
    assert rounded == [
        *((70.0, 0.25), (70.0, 0.25), (62.23, 5.43), (62.23, 5.43)),
        *((0.37, 46.91), (15.56, 46.91)),
    ]
