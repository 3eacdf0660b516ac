"""Test what is said where memory could not be allocated."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

import zlaunch
from tests.limits import LIMIT_S
from tests.needs import needs_package
from zlaunch.runtime.config import load
from zlaunch.runtime.memory.advice import MemoryAdviser, find_holders
from zlaunch.runtime.memory.estimate import Setting
from zlaunch.runtime.offload.manager import OffloadOptions, Tier

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def paste(text: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Put each of the proposed lines into the config, which has to be taken then."""
    lines = text.partition("cheapest first:\n")[2].splitlines()
    changed = [{**config, **json.loads("{" + line + "}")} for line in lines]
    for each in changed:
        load(each)
    return changed


class Greedy(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ...")


def test_the_error_stays_what_it_is_and_says_more() -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": ADAM,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
        "activation_checkpointing": {"partition_activations": False},
    }
    engine, *_ = zlaunch.initialize(model=Greedy(200, 200), config=config)
    kept = torch.zeros(30_000, 1000)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine(torch.ones(1, 2))
    engine.destroy()
    text = str(caught.value)
    assert len(caught.value.args) == 1, "accelerate's search for a batch size looks at that"
    assert text.startswith("CUDA out of memory. Tried to allocate 9.00 GiB.")
    assert "\nzlaunch: out of memory in forward:\n" in text and "planned without activations: " in text
    # other tests may have left something in this process
    assert f"largest tensors: float32 {list(kept.shape)} 114 MiB" in text
    assert "; plus the activations saved for the backward pass" in text
    assert paste(text, config) == [
        {**config, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    ]


BLOCKS = torch.nn.Module()
BLOCKS.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])


def adviser(
    stage: int, *, world: int, config: dict[str, Any], checkpoints: bool = False, **offload: Any
) -> Any:
    options = OffloadOptions(**offload)
    setting = Setting(
        stage=stage,
        world_size=world,
        blocks=[0, *[10**9] * 4],
        dtype_bytes=2,
        states=2,
        offload=options,
    )
    return MemoryAdviser(setting, [], None, torch.device("cpu"), config, checkpoints, BLOCKS)


def test_the_cheapest_change_that_saves_enough() -> None:
    config = {"train_batch_size": 64, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    near = adviser(1, world=8, config=config)
    (first, *_) = near.changes(2**30, 1, 1, of_pass=True)
    assert json.loads(f"{{{first}}}") == {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    far = near.changes(15 * 10**9, 1, 1, of_pass=True)
    assert json.loads(f"{{{far[0]}}}")["zero_optimization"]["stage"] == 3
    alone = adviser(0, world=1, config={}).changes(2**30, 9, 2, of_pass=True)
    assert json.loads(f"{{{alone[0]}}}") == {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    }
    assert json.loads(f"{{{alone[2]}}}") == {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 6,
    }


@needs_package("transformers")
def test_large_logits_are_advised_against() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def advised(vocab: int, section: dict[str, Any], *, of_pass: bool = True) -> list[Any]:
        """Return what is advised for activation_checkpointing."""
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        shape = LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=vocab, **sizes)
        config = {"activation_checkpointing": section}
        one = replace(adviser(0, world=1, config=config), model=LlamaForCausalLM(shape))
        changes = [json.loads(f"{{{each}}}") for each in one.changes(2**30, 1, 1, of_pass=of_pass)]
        return [each["activation_checkpointing"] for each in changes if "activation_checkpointing" in each]

    assert advised(4096, {"tile_tokens": 64}) == [
        {"tile_tokens": 64, "tiled_loss": True},
        {"tile_tokens": 64, "enabled": True},
    ]
    assert advised(4096, {"tiled_loss": True}) == [{"tiled_loss": True, "enabled": True}]
    assert advised(16, {}) == [{"enabled": True}], "they are small"
    assert advised(4096, {}, of_pass=False) == []


def test_what_has_everything_is_told_so() -> None:
    all_used = adviser(
        3,
        world=8,
        config={},
        checkpoints=True,
        optimizer=Tier.DISK,
        parameters=Tier.DISK,
        max_in_cpu_numel=0,
    )
    assert all_used.changes(2**30, 1, 1, of_pass=True) == []
    assert "no config setting saves much: use more GPUs" in all_used.explain(2**30, "forward", 1, 1)


def test_only_what_helps_where_it_ran() -> None:
    """A step keeps no activations, nor does an evaluation; on a CPU the host's memory is the device's."""
    one = adviser(3, world=8, config={}, optimizer=Tier.HOST, parameters=Tier.HOST)
    in_step = one.explain(2**30, "step", 4, 1)
    assert "enabled" not in in_step and "micro_batch" not in in_step and "backward" not in in_step
    with torch.no_grad():
        assert "micro_batch" not in one.explain(2**30, "forward", 4, 1)
    assert "micro_batch" in one.explain(2**30, "forward", 4, 1)
    on_cpu = replace(one, setting=replace(adviser(0, world=1, config={}).setting, device_is_host=True))
    for change in on_cpu.changes(2**30, 1, 1, of_pass=False):
        assert "nvme" in change, "to the host's memory nothing can be moved"
    small = replace(on_cpu, setting=replace(on_cpu.setting, blocks=[512 * 512]))
    assert not [change for change in small.changes(1 << 20, 1, 1, of_pass=False) if "nvme" in change]


def test_holders_by_purpose() -> None:
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAM, "zero_optimization": {"stage": 1}}
    model = torch.nn.Linear(1000, 1000, bias=False)
    engine, *_ = zlaunch.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 1000)).sum())
    engine.step()
    batch = torch.zeros(777, 3)
    pair = [torch.zeros(2000, 99)[:1000] for _ in range(2)]
    step = engine._shard_step
    assert step is not None
    found = {
        name: (count, nbytes)
        for name, count, nbytes in find_holders(step.units, step.optimizer, engine.device)
    }
    assert found["float32 [777, 3]"] == (1, batch.nbytes)
    assert found["float32 [2000, 99]"] == (2, 2 * 4 * 2000 * 99), len(pair)
    assert found["optimizer state"][1] >= 8 * 10**6
    assert found["parameters"][1] >= 4 * 10**6
    engine.destroy()


SCRIPT = """
    import resource, torch, zlaunch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = zlaunch.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(4, 64)).sum())
    engine.step()
    inputs = torch.ones(64, 64).expand(10**6, 64, 64)  # 16 GB, without memory until it is used
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
    engine(inputs)
"""


@pytest.mark.exhaustive
def test_host_memory_that_really_runs_out() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "the test sets this itself"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 1
    assert "RuntimeError: " in ended.stderr and "can't allocate memory: you tried to allocate" in ended.stderr
    where = ended.stderr.rindex("zlaunch: out of memory in forward:")
    said = ended.stderr[where:]
    assert "this process uses " in said and '"train_micro_batch_size_per_gpu": 2' in said, said
