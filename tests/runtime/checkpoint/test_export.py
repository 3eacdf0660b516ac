"""Test weights out of a checkpoint: what others read, in little memory, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

import zlaunch
from tests.runtime.checkpoint.test_save_load import Rich, engine_of, settings
from tests.runtime.models import batches, train_engine
from tests.runtime.workers import run_workers
from zlaunch.cli.main import main as cli
from zlaunch.runtime.checkpoint.export.full_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    export,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    parse_size,
)
from zlaunch.runtime.checkpoint.export.full_weights import main as script
from zlaunch.runtime.checkpoint.format.manifest import Checkpoint, find
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError


def _save(folder: str, name: str) -> dict[str, Any]:
    engine = engine_of(name, "")
    train_engine(engine, batches(2, 12))
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "direct.bin")
    state = {key: value.clone() for key, value in engine.module.state_dict().items()}
    engine.destroy()
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("export")
    return folder, run_workers(_save, 2, str(folder), "stage3")[0]


def test_the_whole_model_in_fp32(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, want = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == want.keys()
    assert all(torch.equal(state[key], want[key]) for key in want)
    other = Rich()
    assert load_state_dict_from_zero_checkpoint(other, folder) is other
    assert all(torch.equal(value, want[key]) for key, value in other.state_dict().items())
    part = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert "frozen.weight" not in part and "net.embedding.weight" in part
    with pytest.raises(CheckpointError, match="no such folder"):
        get_fp32_state_dict_from_zero_checkpoint(folder / "none")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("size", [None, 20_000])
def test_files_that_torch_and_hugging_face_read(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str, size: int | None
) -> None:
    folder, want = saved
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, size, kind == "safetensors")
    stem, read = ("model", load_file) if kind == "safetensors" else ("pytorch_model", torch.load)
    if size is None:
        files = [tmp_path / f"{stem}.{kind}"]
    else:
        index = json.loads((tmp_path / f"{stem}.{kind}.index.json").read_text())
        files = sorted(tmp_path.glob(f"{stem}-*-of-*.{kind}"))
        assert len(files) > 3 and {path.name for path in files} == set(index["weight_map"].values())
        for name, file in index["weight_map"].items():
            assert name in read(tmp_path / file)
        largest = max(value.numel() * value.element_size() for value in want.values())
        assert all(path.stat().st_size < max(size, largest) + 9000 for path in files)
    found: dict[str, Any] = {}
    for path in files:
        found |= read(path)
    tied = {"net.head.weight"}
    assert found.keys() == want.keys() - (tied if kind == "safetensors" else set())
    assert all(torch.equal(found[key], want[key]) and found[key].shape == want[key].shape for key in found)
    assert list(tmp_path.glob(".*")) == []
    if kind == "safetensors" and size is None:  # the safetensors library's own way to load tied weights
        other = Rich()
        missing, unexpected = load_model(other, files[0])
        assert not missing and not unexpected
        assert all(torch.equal(value, want[key]) for key, value in other.state_dict().items())


def test_the_command_names_tied_weights_that_a_file_has_once(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "left out: net.head.weight, which is net.embedding.weight; --format bin has tied weights under"
    for kind in ("safetensors", "bin"):
        assert cli(["checkpoint", "export", str(saved[0]), str(tmp_path / kind), "--format", kind]) == 0
        assert (said in capfd.readouterr().err) is (kind == "safetensors")


def test_an_export_of_an_adapter_names_what_reads_it(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["cp", "-r", saved[0], tmp_path / "checkpoint-3"], check=True)
    (tmp_path / "checkpoint-3" / "adapter_config.json").write_text("{}")
    assert cli(["checkpoint", "export", str(tmp_path / "checkpoint-3"), str(tmp_path / "out")]) == 0
    assert f"PeftModel.from_pretrained(base, '{tmp_path / 'checkpoint-3'}')" in capfd.readouterr().err


def test_in_16_bits(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, want = saved
    path = find(folder)
    assert path is not None
    export(Checkpoint(path), tmp_path, dtype=torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    for name, value in found.items():
        assert torch.equal(value, want[name].bfloat16() if want[name].is_floating_point() else want[name])


def test_damage_stops_an_export(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = saved
    subprocess.run(["cp", "-r", folder, tmp_path / "copy"], check=True)
    file = next((tmp_path / "copy").glob("global_step*/rank_00001.safetensors"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "copy", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_config_and_tokenizer_go_along(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def exported(name: str, *flags: str, fails: bool = False) -> dict[str, str]:
        """The texts of what lies beside the weights, which zlaunch and zero_to_fp32.py write alike."""
        both = []
        for index, command in enumerate((lambda words: cli(["checkpoint", "export", *words]), script)):
            out = tmp_path / name / str(index)
            out.mkdir(parents=True)
            (out / "vocab.txt").write_text("there before")
            assert bool(command([str(tmp_path / "run"), str(out), *flags])) == fails
            shown = capsys.readouterr()
            if index == 0 and "--like" in flags and not fails:
                assert "1 of them replaced files of the same name\n" in shown.err
            else:
                assert ("error: " in shown.err) == fails and "Traceback" not in shown.err
            found = {path.name: path.read_text() for path in out.iterdir() if path.stat().st_size < 100}
            assert all(str(out / name) in shown.out for name in found if name != "vocab.txt")
            both.append(found)
        assert both[0] == both[1]
        return both[0]

    subprocess.run(["cp", "-r", saved[0], tmp_path / "run"], check=True)
    before = {"vocab.txt": "there before"}
    (tmp_path / "config.json").write_text('{"my": "own"}')  # of the script, perhaps
    assert exported("none") == before
    model = {"config.json": '{"model_type": "gpt2"}', "tokenizer.json": "t", "generation_config.json": "g"}
    model |= {"merges.txt": "m", "vocab.txt": "v", "spiece.model": "s", "chat_template.jinja": "c"}
    for name, text in {**model, "train.py": "", "model.bin": "x", "tokenizers": ""}.items():
        (tmp_path / "run" / name).write_text(text)
    model["tokenizers"] = ""
    assert exported("beside") == model | before
    (tmp_path / "run").joinpath("config.json").rename(tmp_path / "config.json")
    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.txt").write_text("o")
    (other / "config.json").write_text("not for us to judge")
    assert exported("like", "--like", str(other)) == {"vocab.txt": "o", "config.json": "not for us to judge"}
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        assert exported(folder, "--like", str(tmp_path / folder), fails=True) == before
    assert not list((tmp_path / "missing").glob("*/*model*")), "what is missing is said at once"


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "500 MiB", "17", "1.5kb")] == [
        5 * 10**9,
        500 << 20,
        17,
        1500,
    ]
    for text in ("", "GB", "1.2.3GB", "-5", "5XB", "0"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


def _large(folder: str) -> None:
    zlaunch.init_distributed()
    model = torch.nn.Sequential(*(torch.nn.Linear(4000, 4000) for _ in range(3)))
    engine, *_ = zlaunch.initialize(model=model, config=settings("stage1", 1, ""))
    engine.save_checkpoint(folder)


MEMORY = """
import resource, sys, torch
import zlaunch.runtime.checkpoint.export.full_weights
import zlaunch.runtime.checkpoint.export.named, zlaunch.runtime.checkpoint.trainer_checkpoints
from zlaunch.cli.main import main
torch.empty(1 << 20).clone()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["checkpoint", "export", sys.argv[1], sys.argv[2]]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.exhaustive
@pytest.mark.exclusive  # resident memory is less where the kernel takes pages back for others
def test_the_memory_of_an_export_is_less_than_the_largest_tensor(tmp_path: Path) -> None:
    """192 MB of weights, of which the largest tensor is 64 MB."""
    run_workers(_large, 1, str(tmp_path / "saved"))
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "saved"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    grown = int(done.stdout.splitlines()[-1]) * 1024
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 180e6
    assert grown < 64e6, f"{grown / 1e6:.0f} MB"


def _gpt2(folder: str) -> list[Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    zlaunch.init_distributed()
    torch.manual_seed(3)
    shape = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=40, bos_token_id=0)
    engine, *_ = zlaunch.initialize(
        model=GPT2LMHeadModel(shape),
        config=settings("stage3", 2, "") | {"train_micro_batch_size_per_gpu": 2},
    )
    tokens = torch.arange(40).view(2, 20)
    for _ in range(3):
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        logits = engine(tokens).logits.clone()
    engine.save_checkpoint(folder)
    shape.save_pretrained(Path(folder, "hf"))
    return logits.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_from_pretrained_of_an_export_gives_equal_logits(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.tensor(run_workers(_gpt2, 2, str(tmp_path))[0])
    path = find(tmp_path)
    assert path is not None
    export(Checkpoint(path), tmp_path / "hf", kind=kind, max_shard_bytes=40_000)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(40).view(2, 20)).logits, logits, rtol=1e-4, atol=1e-5)
