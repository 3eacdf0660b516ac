"""Test what others have saved, loaded into an engine: DeepSpeed, torch, safetensors, Hugging Face."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zlaunch
from tests.data.deepspeed_checkpoints.make import Model, batch, config, groups, loss_of
from tests.runtime.checkpoint.test_save_load import content
from tests.runtime.workers import run_workers
from zlaunch.runtime.checkpoint.convert.common import ForeignCheckpoint
from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign
from zlaunch.runtime.checkpoint.export.full_weights import export, get_fp32_state_dict_from_zero_checkpoint
from zlaunch.runtime.checkpoint.format.manifest import VALUE, Checkpoint
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

MADE = Path(__file__).parents[2] / "data" / "deepspeed_checkpoints"
"""By tests/data/deepspeed_checkpoints/make.py with DeepSpeed 0.19.8."""
CASES = sorted(path.parent.name for path in MADE.glob("*/expected.json"))


def test_there_is_every_stage_and_world() -> None:
    assert {f"stage{stage}-{world}" for stage in (1, 2, 3) for world in (1, 2)} < set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_values_and_moments_are_deepspeeds_to_the_bit(tmp_path: Path, case: str) -> None:
    """Against what DeepSpeed's own accessors and its own zero_to_fp32 gave."""
    expected = load_file(MADE / case / "expected.safetensors")
    facts = json.loads((MADE / case / "expected.json").read_text())
    path = write_foreign(read_foreign(MADE / case), tmp_path)
    found = content(path)
    for key, value in expected.items():
        if not key.startswith("fp32/"):
            assert torch.equal(found[key].float(), value.reshape(-1)), key
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert whole.keys() == Model().state_dict().keys()
    assert whole["head.weight"].data_ptr() == whole["embedding.weight"].data_ptr()
    export(Checkpoint(path), tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    own = [key.removeprefix("fp32/") for key in expected if key.startswith("fp32/")]
    # at stage 1 DeepSpeed's zero_to_fp32 leaves frozen parameters out; stage 0 is none of its business
    assert len(own) >= (12 if "stage1" in case else 14) or "stage0" in case
    for name in own:
        assert torch.equal(whole[name].float(), expected[f"fp32/{name}"]), name
        if name != "head.weight":
            assert torch.equal(exported[name].float(), expected[f"fp32/{name}"]), name
    manifest = Checkpoint(path).manifest
    assert manifest["engine"]["global_steps"] == facts["steps"] == 3
    assert manifest["client_state"] == {"note": "hello", "numbers": [1, 2.5]}
    if "stage0" not in case:
        assert manifest["optimizer"]["groups"][0]["lr"] == pytest.approx(facts["lr"][0])
        assert found["norm.bias/scalars"]["step"] == ["F32", 3.0]


def _each_goes_on(cases: list[tuple[str, int, str, int]]) -> list[list[float]]:
    return [_goes_on(*case) for case in cases]


def _goes_on(folder: str, stage: int, dtype: str, saved_by: int) -> list[float]:
    """Mean losses of the steps that followed; the samples of ``saved_by`` ranks are shared out anew."""
    zlaunch.init_distributed()
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    given = config(stage, dtype) | {"train_micro_batch_size_per_gpu": 4 * saved_by // world}
    del given["zero_allow_untested_optimizer"]
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    engine, *_ = zlaunch.initialize(model=model, optimizer=optimizer, config=given)
    _, client = engine.load_checkpoint(folder)
    assert client["note"] == "hello" and engine.global_steps == 3
    losses = []
    for step in range(3, 6):
        tokens = torch.cat([batch(step, other) for other in range(saved_by)]).chunk(world)[rank]
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    engine.destroy()
    return (total / world).tolist()


ON = [(case, 2, 3) for case in CASES if "stage0" not in case]
ON += [(f"stage{stage}-2", *other) for stage in (1, 2, 3) for other in ((1, 2), (4, 1))]
"""World sizes and stages to go on with."""


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_next_steps_are_those_that_deepspeed_made(tmp_path: Path, world: int) -> None:
    cases, given = [case for case in ON if case[1] == world], []
    for case, _, stage in cases:
        folder = tmp_path / case
        write_foreign(read_foreign(MADE / case), folder)
        given.append((str(folder), stage, "bf16" if "bf16" in case else "fp32", int(case.split("-")[1])))
    found = run_workers(_each_goes_on, world, given)[0]
    for (case, *_), losses in zip(cases, found, strict=True):
        expected = json.loads((MADE / case / "expected.json").read_text())["losses"]
        assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in case else 1e-4), case


def test_it_can_be_told_from_a_file_that_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/run",)

    torch.save({"a": torch.ones(3), "b": Evil()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt: contains pickled objects.*system"):
        read_foreign(tmp_path / "x.pt")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("with_sums", [True, False])
def test_a_bit_that_has_changed_is_noticed(tmp_path: Path, with_sums: bool) -> None:
    value = torch.arange(1.0, 9.0)
    torch.serialization.set_crc32_options(with_sums)
    try:
        torch.save({"a": value}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(_value(read_foreign(tmp_path / "x.pt"), "a"), value)
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[content.find(value.numpy().tobytes()) + 2] ^= 64
    (tmp_path / "x.pt").write_bytes(content)
    if not with_sums:  # there is nothing that could tell
        read_foreign(tmp_path / "x.pt")
        return
    with pytest.raises(CheckpointError, match=r"x\.pt: .*it is damaged: Bad CRC-32 for file 'x/data/0'"):
        read_foreign(tmp_path / "x.pt")


def _value(found: ForeignCheckpoint, name: str) -> Tensor:
    return found.parameters[name].contents[VALUE][1][0]


def test_parts_that_are_missing(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(MADE / "stage3-2", tmp_path / "a")
    (tmp_path / "a" / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 1 of 2"):
        read_foreign(tmp_path / "a")
    with pytest.raises(CheckpointError, match="has no checkpoint 'b'"):
        read_foreign(tmp_path / "a", "b")
    with pytest.raises(CheckpointError, match="no known checkpoint found"):
        read_foreign(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_foreign(tmp_path / "no")
    (tmp_path / "x.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="cannot be read by torch"):
        read_foreign(tmp_path / "x.pt")
    (tmp_path / "x.safetensors").write_bytes(b"rubbish and more rubbish")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_foreign(tmp_path / "x.safetensors")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="contains no state_dict"):
        read_foreign(tmp_path / "list.pt")


def test_what_lies_beside_a_model_in_a_torch_file_is_named(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}, "opt": {"step": 1}, "epoch": 3}, tmp_path / "x.pt")
    found = read_foreign(tmp_path / "x.pt")
    assert list(found.parameters) == ["weight"] and found.left_out == ("opt", "epoch")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)
        self.third = nn.Linear(3, 4)
        self.third.weight = self.first.weight


def _load(folder: str, stage: int) -> dict[str, Any]:
    zlaunch.init_distributed()
    torch.manual_seed(4)
    engine, *_ = zlaunch.initialize(
        model=Normed(),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
        optimizer=lambda p: torch.optim.AdamW(p),
    )
    assert engine.load_checkpoint(folder)[0] is not None
    return {key: value.clone() for key, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("kind", ["pt", "nested", "ddp", "safetensors", "folder", "bin folder"])
def test_weights_of_torch_and_hugging_face(tmp_path: Path, kind: str) -> None:
    """Buffers, which such files do not tell from parameters; tied weights, which safetensors cannot have."""
    torch.manual_seed(9)
    model = Normed()
    for buffer, value in ((model.norm.running_mean, 2), (model.norm.num_batches_tracked, 5)):
        assert buffer is not None
        buffer.add_(value)
    state = model.state_dict()
    source = tmp_path / "source"
    source.mkdir()
    untied = {name: value.clone() for name, value in state.items() if name != "third.weight"}
    if kind == "safetensors":
        source = source / "x.safetensors"
        save_file(untied, source)
    elif "folder" in kind:
        names = sorted(untied)
        suffix = "bin" if kind.startswith("bin") else "safetensors"
        stem = "pytorch_model" if suffix == "bin" else "model"
        places: dict[Any, Any] = {}
        for index, part in enumerate((names[:4], names[4:])):
            file = f"{stem}-{index}.{suffix}"
            places |= dict.fromkeys(part, file)
            tensors = {name: untied[name] for name in part}
            (torch.save if suffix == "bin" else save_file)(tensors, source / file)
        (source / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        source = source / "x.pt"
        prefix = "module." if kind == "ddp" else ""
        plain: Any = {prefix + name: value for name, value in state.items()}
        torch.save({"model": plain, "epoch": 3} if kind == "nested" else plain, source)
    write_foreign(read_foreign(source), tmp_path / "out", "x")
    for stage, world in ((0, 1), (3, 2)):
        for loaded in run_workers(_load, world, str(tmp_path / "out"), stage):
            assert all(torch.equal(loaded[name], value) for name, value in state.items()), stage
    assert content(tmp_path / "out" / "x")[f"first.weight/{VALUE}"].numel() == 12


@pytest.mark.parametrize("file", ["fp32", "exp_avg", "step"])
def test_a_universal_checkpoint_without_a_file_of_a_parameter_is_refused(tmp_path: Path, file: str) -> None:
    shutil.copytree(MADE / "stage2-2-universal", tmp_path / "copy")
    (tmp_path / "copy" / "tag_universal" / "zero" / "norm.weight" / f"{file}.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"norm\.weight/{file}\.pt: is missing"):
        read_foreign(tmp_path / "copy")
