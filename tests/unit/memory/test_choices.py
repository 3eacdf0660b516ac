"""Test what `zlaunch estimate` compares and chooses, and what it reads a model's sizes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.config import load, resolve
from zlaunch.runtime.errors import MemoryPlanError
from zlaunch.runtime.memory.activations import Activations, of_numbers
from zlaunch.runtime.memory.choices import (
    Estimated,
    Machines,
    compare,
    config_text,
    fastest_that_fits,
)
from zlaunch.runtime.memory.estimate import GIB
from zlaunch.runtime.memory.model import from_function, from_numbers
from zlaunch.runtime.mesh import MeshShape

GPT2_XL = from_numbers(1_557_611_200, 1600, 48, 50257)


def estimated(
    gpu: float | None, host: float | None = None, gpus: int = 4
) -> tuple[list[Estimated], Machines]:
    machines = Machines(
        nodes=1,
        gpus=gpus,
        gpu_bytes=None if gpu is None else int(gpu * GIB),
        host_bytes=None if host is None else int(host * GIB),
    )
    return compare(GPT2_XL, machines, of_numbers(GPT2_XL, 1024, 1, 2), dtype_bytes=2), machines


def test_gpt2_xl_in_the_papers_numbers() -> None:
    """2 bytes of parameters, 4 of gradients, 12 of Adam's state; shared by four ranks as the stage says."""
    found, _ = estimated(None)
    n = GPT2_XL.numel
    by_name = {each.choice.name: each.states for each in found if not each.choice.checkpointed}
    assert by_name["stage 0"].total.device == 18 * n
    assert by_name["stage 1"].total.device == 6 * n + 12 * n // 4
    assert by_name["stage 2"].parameters.device == 2 * n
    assert by_name["stage 2"].optimizer.device == 12 * n // 4
    offloaded = by_name["stage 3, optimizer and parameters on CPU"]
    assert offloaded.optimizer.device == 0 and offloaded.optimizer.host == 12 * n // 4
    assert by_name["stage 3, optimizer and parameters on NVMe"].total.disk >= 14 * n // 4


def test_gpt3_in_the_papers_numbers() -> None:
    """2.8 TB for 175 billion parameters (ZeRO-Infinity, 2021), and 2 bytes more for each: sums in fp32. A
    layer of 1.8 billion is gathered and reduced in three parts.
    """
    n = 174_600_000_000
    machines = Machines(nodes=128, gpus=8, gpu_bytes=None, host_bytes=None)
    found = compare(from_numbers(n, 12288, 96, 50257), machines, None, dtype_bytes=2)
    by_name = {each.choice.name: each.states for each in found}
    assert by_name["stage 0"].total.device == 18 * n and 16 * n == pytest.approx(2.8e12, rel=0.01)
    assert by_name["stage 3"].optimizer.device == pytest.approx(12 * n / 1024, rel=1e-6)
    layer = 12 * 12288 * 12288
    root = n - 96 * layer
    assert by_name["stage 3"].parameters.device == pytest.approx(2 * (root + 2 * layer / 3), rel=1e-6)
    buckets = 2 * (root + 2 * layer / 3)
    assert by_name["stage 3"].gradients.device == pytest.approx(buckets + 4 * n / 1024, rel=1e-6)
    everything = by_name["stage 3, optimizer and parameters on NVMe"].total
    assert everything.disk * 1024 == pytest.approx(18 * n, rel=0.02)


def test_activations_by_the_formula() -> None:
    """34 s b h bytes a layer; the input of each layer, and one layer whole, where blocks are checkpointed."""
    found = of_numbers(GPT2_XL, 1024, 2, 2)
    tokens, head = 2048, 2048 * 50257 * 12
    assert found is not None and found.checkpointed is not None
    assert found.plain == 34 * tokens * 1600 * 48 + head
    assert found.checkpointed == 2 * tokens * 1600 * 48 + head
    assert of_numbers(from_numbers(1e9, None, None, None), 1024, 1, 2) is None


def test_a_tiled_loss_has_the_logits_of_one_tile() -> None:
    whole = of_numbers(GPT2_XL, 4096, 2, 2)
    tiled = of_numbers(GPT2_XL, 4096, 2, 2, tiled_loss=True)
    assert whole is not None and tiled is not None
    tile = 2**26 // 50257
    assert whole.plain - tiled.plain == (8192 - tile) * 50257 * 12
    short = of_numbers(GPT2_XL, tile // 2, 2, 2)
    assert short == of_numbers(GPT2_XL, tile // 2, 2, 2, tiled_loss=True), "it is one tile"


@given(st.floats(2.0, 60.0), st.floats(4.0, 200.0), st.integers(1, 8))
def test_what_is_chosen_fits_and_nothing_faster_does(gpu: float, host: float, gpus: int) -> None:
    found, machines = estimated(gpu, host, gpus)
    best = fastest_that_fits(found, machines)
    for each in found:
        fits = each.device + machines.reserved_bytes <= gpu * GIB and each.states.total.host * gpus <= int(
            host * GIB
        )
        if each is best:
            assert fits
            return
        assert not fits
    assert best is None


@pytest.mark.parametrize(
    ("axes", "world_size", "gib", "text"),
    [
        (MeshShape(), 1, 1, "1.0 for CUDA"),
        (MeshShape(), 8, 3, "3.0 for CUDA and NCCL"),
        (MeshShape(tensor=2), 8, 4, "4.0 for CUDA and NCCL"),
        (MeshShape(tensor=4, pipeline=2), 8, 5, "5.0 for CUDA and NCCL"),
        (MeshShape(expert=4), 8, 6, "6.0 for CUDA and NCCL"),
    ],
)
def test_nccl_takes_memory_for_each_communicator(
    axes: MeshShape, world_size: int, gib: int, text: str
) -> None:
    """Two for the data-parallel ranks, which gather and reduce at once; one for each further axis."""
    machines = Machines(nodes=1, gpus=world_size, gpu_bytes=None, host_bytes=None, axes=axes)
    assert machines.reserved_bytes == gib * GIB and machines.reserved_text == text


@pytest.mark.parametrize("gpu", [80.0, 24.0, 14.0, 9.0, 5.0])
def test_the_config_is_one_that_zlaunch_reads(gpu: float, tmp_path: Path) -> None:
    found, machines = estimated(gpu, 500.0)
    best = fastest_that_fits(found, machines)
    assert best is not None
    path = tmp_path / "ds.json"
    path.write_text(config_text(best, machines, dtype="bf16", micro_batch=2, axes=MeshShape()))
    config = resolve(load(path), world_size=4).config
    assert config.zero_optimization.stage == best.choice.stage and config.bf16.enabled
    assert config.activation_checkpointing.enabled is best.choice.checkpointed
    offload = config.zero_optimization.offload_optimizer
    assert (offload.device if offload is not None else "none") == best.choice.optimizer.value


def test_one_rank_has_nothing_to_shard() -> None:
    found, _ = estimated(None, gpus=1)
    assert [each.choice.stage for each in found if not each.choice.checkpointed] == [0, 2, 3, 3, 3]


def test_activations_that_are_not_known_are_left_out() -> None:
    machines = Machines(nodes=1, gpus=1, gpu_bytes=None, host_bytes=None)
    found = compare(GPT2_XL, machines, None, dtype_bytes=2)
    assert all(each.activations is None and not each.choice.checkpointed for each in found)
    large = Machines(nodes=1, gpus=1, gpu_bytes=1 << 50, host_bytes=None)
    small = Machines(nodes=1, gpus=1, gpu_bytes=GIB, host_bytes=None)
    assert {each.fits(large) for each in found} == {None} and {each.fits(small) for each in found} == {False}
    known = compare(GPT2_XL, machines, Activations(10, None, "test"), dtype_bytes=2)
    assert [each.device for each in known] == [each.device + 10 for each in found]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nothing", "expected package.module:function"),
        ("no.such.module:build", "no.such.module cannot be imported: ModuleNotFoundError"),
        ("math:nothing", "math:nothing: no such name"),
        ("math:pi", "math:pi: pi is a float, not a function"),
        ("os:getcwd", "returns str, not an nn.Module"),
        ("torch:ones", "failed on torch's meta device"),
    ],
)
def test_what_builds_no_model_is_named(target: str, text: str) -> None:
    with pytest.raises(MemoryPlanError, match=text):
        from_function(target)


def test_a_file_with_a_dataclass(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n"
        "@dataclass\nclass Size:\n    width: int = 3\n"
        "def build():\n    return torch.nn.Linear(Size().width, 2, bias=False)\n"
    )
    assert from_function(f"{tmp_path}/model.py:build").numel == 6


def test_layers_that_are_larger_than_the_model() -> None:
    with pytest.raises(MemoryPlanError, match="more than the 1e\\+09 of --params"):
        from_numbers(1e9, 8192, 80, None)


@pytest.mark.parametrize("shape", ["", "a", "8,", "8:int3", "8;3"])
def test_a_shape_that_is_none(shape: str) -> None:
    from zlaunch.runtime.memory.fake_step import parse_shape  # takes a second, so only where it is tested

    with pytest.raises(MemoryPlanError, match="expected sizes such as"):
        parse_shape(shape)
