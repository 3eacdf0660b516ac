"""Compare parallel training of tiny Hugging Face models with one process, in float64.

The test files of the parallel axes list the cases: families, ranks, axes, stages. This module runs them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.checkpoint.export.consolidate import consolidated_state_dict
from zlaunch.runtime.checkpoint.export.full_weights import get_fp32_state_dict_from_zero_checkpoint

STEPS, BATCH, LENGTH, TOLERANCE = 5, 8, 12, 1e-9
EPS = 1e-4
"""Is large enough that gradients which are all but zero are not scaled up to the size of others."""
MICRO_BATCHES = 4
"""The micro-batches of a step in a pipeline."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "phi": {},
    "olmo": {},
    "olmo2": {},
    "mixtral": MOE,
    "qwen3_moe": {**MOE, "head_dim": 8},
    "phi3": {},
    "deepseek_v2": {
        **MOE,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
        **{"n_shared_experts": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    },
    "gpt_oss": {**MOE, "head_dim": 8},
    "mamba": {},
    "qwen2": {},
    "gemma3_text": {"head_dim": 8},
    "cohere": {},
    "cohere2": {},
    "granite": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "smollm3": {},
    "helium": {"head_dim": 8},
    "nemotron": {},
    "arcee": {},
    "ernie4_5": {},
    "exaone4": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make(family: str, attention: str = "eager", **changes: Any) -> Any:
    """Make a tiny model of a family in float64, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    plainly = {"attn_implementation": attention, "experts_implementation": "eager"}
    AutoModelForCausalLM.from_config(config, **plainly)  # loads its files
    _compute_in_float64()
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, **plainly).double()


class _WideTorch:
    """Stands for torch in the models' files, which compute norms, softmax and losses in float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def _compute_in_float64() -> None:
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # in a worker of this test alone
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and getattr(module, "torch", None) is torch:
            module.torch = _WideTorch()  # type: ignore[attr-defined]  # it has that name


def plain(model: Any, clip: float = 0.5) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process, with gradients clipped to a norm if it is not 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=EPS)
    losses = []
    for batch in data():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def data() -> list[torch.Tensor]:
    """Make the batches of all steps, over all ranks."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 64, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def settings(stage: int, tensor: int, data_size: int, **changes: Any) -> dict[str, Any]:
    """Return a config."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // data_size,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {"tensor": tensor},
        **changes,
    }


def config_of(stage: int, parallel: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return a config for the ranks that there are.

    Args:
        stage: The ZeRO stage.
        parallel: The size of each axis. Ranks of the expert axis train on different samples.
        changes: Other sections and keys.
    """
    shared = math.prod(size for name, size in parallel.items() if name != "expert")
    count = MICRO_BATCHES if parallel.get("pipeline", 1) > 1 else 1
    config = settings(stage, 1, torch.distributed.get_world_size() // shared * count)
    return {**config, "parallel": parallel, "gradient_accumulation_steps": count, **changes}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest error, relative to each tensor's largest element; NaN where one is NaN."""
    assert found.keys() == wanted.keys()
    errors = [
        ((found[name].cpu() - value).abs().max() / value.abs().max().clamp_min(1e-12)).item()
        for name, value in wanted.items()
    ]
    return _largest(errors)


def _largest(errors: Iterable[float]) -> float:
    """Return the largest error or NaN, which the built-in max() ignores behind a number."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def train(engine: Any, first: int = 0, last: int = STEPS, **inputs: torch.Tensor) -> list[float]:
    """Train on this rank's samples; return the mean losses of all ranks.

    A pipeline needs `train_batch`. Other engines have it, too, and use it in the last step.

    Args:
        engine: The engine.
        first: The first step.
        last: The step before which training ends.
        inputs: Other arguments of the model, for the samples of all ranks.
    """
    losses = []
    for step, batch in list(enumerate(data()))[first:last]:
        given = {"input_ids": batch, "labels": batch, **inputs}
        whole = {name: value.to(engine.device) for name, value in given.items()}
        own = _chunks(whole, engine.data_parallel_size)[engine.data_parallel_rank]
        if engine.comm.mesh.pipeline > 1 or step == STEPS - 1:
            micro_batches = _chunks(own, engine.gradient_accumulation_steps())
            losses.append(engine.train_batch(iter(micro_batches)).item())
            continue
        loss = engine(**own).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / engine.world_size)
    return losses


def _chunks(inputs: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Divide the samples of a model's arguments."""
    values = zip(*(value.chunk(count) for value in inputs.values()), strict=True)
    return [dict(zip(inputs, each, strict=True)) for each in values]


# -- training beside one process


CLIPS = (0.0, 0.5)
"""Norms of clipped gradients, taken in turn: clipping hides a wrong scale of all gradients."""


def assert_equals_one_process(
    families: Sequence[str],
    world: int,
    stages: Sequence[int],
    parallel: dict[str, Any],
    *,
    attention: str = "sdpa",
    changes: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Train each family at each stage, and compare losses and weights with plain torch in one process.

    Args:
        families: Keys of `FAMILIES`.
        world: The number of ranks.
        stages: ZeRO stages.
        parallel: The size of each axis.
        attention: The models' implementation of attention.
        changes: Keys of the models' configs.
        config: Sections of zlaunch's config.
    """
    results = run_workers(_compare, world, families, stages, parallel, attention, changes or {}, config)
    for rank, found in enumerate(results):
        assert found.keys() == set(itertools.product(families, stages))
        for (family, stage), errors in found.items():
            case = f"{family} at stage {stage}, {parallel} of {world} ranks, {config}"
            for what, error in errors.items():
                assert error < TOLERANCE, f"{case}: the {what} of rank {rank} are wrong by {error}"


def _compare(
    families: Sequence[str],
    stages: Sequence[int],
    parallel: dict[str, int],
    attention: str,
    changes: dict[str, Any],
    config: dict[str, Any],
) -> dict[tuple[str, int], dict[str, float]]:
    """Return this rank's errors in each case."""
    join()
    found = {}
    for first, family in enumerate(families):
        wanted = {clip: plain(make(family, attention, **changes), clip) for clip in CLIPS}
        for number, stage in enumerate(stages, start=first):
            clip = CLIPS[number % len(CLIPS)]
            losses, weights = wanted[clip]
            model = make(family, attention, **changes)
            engine, *_ = zlaunch.initialize(
                model=model, config=config_of(stage, parallel, gradient_clipping=clip, **config)
            )
            own = train(engine)
            found[family, stage] = {
                "losses": _largest(abs(a - b) for a, b in zip(own, losses, strict=True)),
                "weights": distance(engine.module.state_dict(), weights),
            }
            engine.destroy()
    return found


# -- checkpoints


class Layout(NamedTuple):
    """Describes the ranks, the size of each axis and the ZeRO stage."""

    world: int
    parallel: dict[str, int]
    stage: int


def assert_resumes_under(
    folder: Path,
    saved: Layout,
    others: Iterable[Layout],
    family: str,
    *,
    attention: str = "sdpa",
    changes: dict[str, Any] | None = None,
) -> None:
    """Save after two steps under one layout, and resume under each of the others with equal losses."""
    model = (family, attention, changes or {})
    wanted = run_workers(_save, saved.world, str(folder), saved, *model)[0]
    for layout in others:
        for rank, losses in enumerate(run_workers(_resume, layout.world, str(folder), layout, *model)):
            case = f"{family} saved under {saved}, resumed under {layout}, rank {rank}"
            assert losses == pytest.approx(wanted, abs=TOLERANCE), f"{case}: {losses}, not {wanted}"


def assert_exports_whole_tensors(
    folder: Path,
    saved: Layout,
    family: str,
    *,
    attention: str = "sdpa",
    changes: dict[str, Any] | None = None,
) -> None:
    """Save under a layout, and compare the shapes of the exported tensors with the model's."""
    model = (family, attention, changes or {})
    run_workers(_save, saved.world, str(folder), saved, *model)
    found = _shapes(get_fp32_state_dict_from_zero_checkpoint(folder))
    wanted = run_workers(_whole_shapes, 1, *model)[0]
    assert found == wanted, f"{family} saved under {saved}: {found}, not {wanted}"


def _engine(layout: Layout, family: str, attention: str, changes: dict[str, Any]) -> Any:
    join()
    model = make(family, attention, **changes)
    return zlaunch.initialize(model=model, config=config_of(layout.stage, layout.parallel))[0]


def _save(folder: str, layout: Layout, *model: Any) -> list[float]:
    """Save after two steps; return the losses of the later steps."""
    engine = _engine(layout, *model)
    train(engine, last=2)
    engine.save_checkpoint(folder)
    return train(engine, first=2)


def _resume(folder: str, layout: Layout, *model: Any) -> list[float]:
    engine = _engine(layout, *model)
    assert engine.load_checkpoint(folder)[0] is not None
    return train(engine, first=2)


def _whole_shapes(family: str, attention: str, changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's state, in a worker: :func:`make` changes torch for its process."""
    return _shapes(make(family, attention, **changes).state_dict())


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


# -- other features

OTHER_MODELS = ("frozen", "adapters")
"""Kinds that change the losses, so one rank trains with them, too."""


def assert_variants_train_alike(
    kind: str,
    family: str,
    world: int,
    parallel: dict[str, int],
    folder: Path,
    *,
    attention: str = "sdpa",
    changes: dict[str, Any] | None = None,
) -> None:
    """Train with a feature of the runtime at stage 3, and compare the losses with plain training on one rank.

    Args:
        kind: `offload`, `disk`, `recomputation`, `frozen` or `adapters`.
        family: A key of `FAMILIES`.
        world: The number of ranks.
        parallel: The size of each axis.
        folder: Has the optimizer state for `disk`.
        attention: The models' implementation of attention.
        changes: Keys of the models' configs.
    """
    model = (family, attention, changes or {})
    base = kind if kind in OTHER_MODELS else "plain"
    wanted = run_workers(_train_variant, 1, base, {}, str(folder), *model)[0]
    for rank, losses in enumerate(run_workers(_train_variant, world, kind, parallel, str(folder), *model)):
        case = f"{family} with {kind}, {parallel} of {world} ranks, rank {rank}"
        assert losses == pytest.approx(wanted, abs=TOLERANCE), f"{case}: {losses}, not {wanted}"


def _train_variant(
    kind: str, parallel: dict[str, int], folder: str, family: str, attention: str, changes: dict[str, Any]
) -> list[float]:
    rank = join()
    config = config_of(3, parallel)
    if kind == "offload":
        offloaded = {"device": "cpu"}
        config["zero_optimization"] |= {"offload_optimizer": offloaded, "offload_param": offloaded}
    if kind == "disk":
        config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    model = make(family, attention, **changes)
    if kind == "recomputation":
        model.gradient_checkpointing_enable()
        model.train()
    if kind == "frozen":
        _freeze(model.model)
    if kind == "adapters":
        import peft

        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).double()
    shapes = _shapes(model.state_dict())
    engine, *_ = zlaunch.initialize(model=model, config=config)
    losses = train(engine)
    assert _shapes(consolidated_state_dict(engine._sharded)) == ({} if rank else shapes)
    return losses


def _freeze(model: Any) -> None:
    """Freeze the embedding, and the first layer except its experts."""
    model.embed_tokens.requires_grad_(False)
    for name, parameter in model.layers[0].named_parameters():
        parameter.requires_grad_("experts" in name)
