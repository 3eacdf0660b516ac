"""Test which dtype buffers have under bf16 and fp16, and that what is computed from them is not rounded."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import config
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.errors import UnsupportedError

BIASES = [5.0 + i / 512 for i in range(8)]
"""Differ by less than bf16 does near 5."""


def _small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 1,
    }
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            initializer_range=0.3,
        )
    )


def _logits(model: Any, near: int) -> Tensor:
    tokens = torch.arange(12)[None] % 64
    places = torch.cat([torch.arange(4), torch.arange(near, near + 8)])[None]
    with torch.no_grad():
        out: Tensor = model(input_ids=tokens, position_ids=places).logits
    return out.double()


def _rotary(stage: int, kind: str) -> list[float]:
    """Return how far logits are from fp32's: those of the engine, and with rounded buffers."""
    errors = []
    settings = config(stage, 2, bf16={"enabled": True})
    if kind == "zero.Init":
        with zlaunch.zero.Init(config_dict_or_path=settings):
            model = _small_llama()
    else:
        model = _small_llama()
    engine, *_ = zlaunch.initialize(model=model, config=settings)
    module: Any = engine.module
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    plain = _small_llama()
    plain.load_state_dict({k: v.float() for k, v in module.state_dict().items()})
    for far in (20, 2000, 32000):
        wanted = _logits(plain, far)
        exact = module.model.rotary_emb.inv_freq
        errors.append((_logits(engine, far) - wanted).abs().max().item())
        module.model.rotary_emb.inv_freq = exact.bfloat16()
        errors.append((_logits(engine, far) - wanted).abs().max().item())
        module.model.rotary_emb.inv_freq = exact
    engine.destroy()
    return errors


def _all_rotary() -> list[list[float]]:
    join()
    return [_rotary(0, "plain"), _rotary(3, "plain"), _rotary(3, "zero.Init")]


def test_rotary_frequencies_stay_in_fp32() -> None:
    for errors in run_workers(_all_rotary, 2)[0]:
        kept, rounded = errors[::2], errors[1::2]
        assert kept[1] < 0.1 * rounded[1] and kept[2] < 0.1 * rounded[2], errors


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.register_buffer("score_bias", torch.tensor(BIASES, dtype=torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        chosen = (scores.detach().float() * 1e-9 + self.get_buffer("score_bias")).topk(2).indices
        return scores.gather(-1, chosen)


class Parts(nn.Module):
    """Has buffers of each kind: shared ones, a batch norm's, a spectral norm's, integers."""

    _keep_in_fp32_modules = ("only_fp16",)
    _keep_in_fp32_modules_strict = ("listed_*_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router(), Router()])
        self.routers[1].score_bias = self.routers[0].score_bias
        self.norm = nn.BatchNorm1d(16)
        self.plain_norm = nn.InstanceNorm1d(16, affine=True, track_running_stats=True)
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.old_mix = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("listed_own_bias", torch.tensor(BIASES).bfloat16())
        self.register_buffer("only_fp16", torch.tensor(BIASES).bfloat16())
        self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.old_mix(self.mix(self.plain_norm(torch.stack([self.norm(x), x], -1)).sum(-1)))
        return self.routers[0](x) + self.routers[1](x)


def _dtypes(module: nn.Module) -> dict[str, str]:
    return {name: str(each.dtype).removeprefix("torch.") for name, each in module.named_buffers()}


def _kinds(folder: str) -> None:
    rank = join()
    for section, own in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        cases: list[tuple[int, dict[str, Any]]] = [(0, {}), (3, {})]
        cases += [(2, {"buffer_dtype": section}), (1, {"keep_in_fp32_modules": []})]
        for stage, extra in cases:
            torch.manual_seed(1)
            chosen: dict[str, Any] = {section: {"enabled": True}, "data_types": extra}
            settings = config(stage, 2, **chosen)
            engine, *_ = zlaunch.initialize(model=Parts(), config=settings)
            found = _dtypes(engine.module)
            short = str(own).removeprefix("torch.")
            rest = short if "buffer_dtype" in extra else "float32"
            listed = "keep_in_fp32_modules" not in extra
            other = short if "buffer_dtype" in extra else "bfloat16"
            assert found["routers.0.score_bias"] == rest
            assert found["norm.running_mean"] == found["norm.running_var"] == short
            assert found["plain_norm.running_mean"] == short, "torch 2.6 cannot mix here either"
            assert found["mix.parametrizations.weight.0._u"] == found["old_mix.weight_v"] == short
            assert found["listed_own_bias"] == ("float32" if listed else other)
            assert found["only_fp16"] == ("float32" if listed and section == "fp16" else other)
            assert found["narrow"] == other and found["steps"] == "int64"
            routers: Any = engine.module.routers
            assert routers[0].score_bias is routers[1].score_bias
            loss = engine(torch.randn(2, 16).to(own)).float().square().mean()
            engine.backward(loss)
            engine.step()
            engine.save_16bit_model(folder, f"{section}{stage}.bin")
            if rank == 0 and not extra:
                state = torch.load(f"{folder}/{section}{stage}.bin", weights_only=True)
                assert state["routers.0.score_bias"].tolist() == BIASES
                assert state["routers.0.gate.weight"].dtype == own
            engine.destroy()


def test_buffers_keep_their_dtype(tmp_path: Path) -> None:
    run_workers(_kinds, 2, str(tmp_path))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) * self.scale)
        return y


class Listed(nn.Module):
    _keep_in_fp32_modules_strict = ("score_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.router(x)
        return y


def _messages() -> None:
    join()
    settings = config(3, 2, bf16={"enabled": True})
    engine, *_ = zlaunch.initialize(model=Scaled(), config=settings)
    with pytest.raises(UnsupportedError, match=r'scale is torch\.float32.*"buffer_dtype": "bf16"'):
        engine(torch.ones(2, 8, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r"An input of the model is torch\.float32"):
        engine(torch.ones(2, 8))
    engine.destroy()
    settings["data_types"] = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["firs*", "sclae"]}
    said = io.StringIO()
    with redirect_stdout(said):
        engine, *_ = zlaunch.initialize(model=Scaled(), config=settings)
    is_first = torch.distributed.get_rank() == 0
    assert ("'sclae' matches no parameter or buffer" in said.getvalue()) is is_first
    assert "'firs*' is in" not in said.getvalue()
    assert engine(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    engine.destroy()
    # a transformers model with its own list that is built in 16 bits, before values are loaded into it
    del settings["data_types"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with zlaunch.zero.Init(config_dict_or_path=settings):
            model = Listed()
    finally:
        torch.set_default_dtype(before)
    assert model.router.score_bias.dtype == torch.float32


def test_a_mismatch_of_dtypes_says_what_to_do() -> None:
    run_workers(_messages, 2)
