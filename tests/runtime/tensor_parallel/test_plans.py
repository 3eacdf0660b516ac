"""Test that the styles of all Hugging Face plans are known, and what their patterns mean."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.needs import needs_package
from zlaunch.runtime.parallel.plans import STYLES, find_plan
from zlaunch.runtime.parallel.tensor import Decision

pytestmark = needs_package("transformers")


def plans() -> dict[str, dict[str, str]]:
    """Return the plan of every config class that has one."""
    found = {}
    models = importlib.import_module("transformers.models")
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            configs = importlib.import_module(name)
        except ImportError:
            continue
        for key, value in vars(configs).items():
            plan = getattr(value, "base_model_tp_plan", None)
            if isinstance(value, type) and value.__module__ == name and isinstance(plan, dict) and plan:
                found[f"{module.name}.{key}"] = plan
    return found


LISTED = {"moe_identity_expert", "sequence_parallel"}
"""Styles that are refused by name."""
REFUSED = {
    "deepseek_v2.DeepseekV2Config": "of shape [64, 2814, 4096] cannot be divided by 2",
    "dots3_note.Dots3NoteTextConfig": "have different numbers of heads",
    "embedding_gemma2.EmbeddingGemma2TextConfig": "have different numbers of heads",
    "longcat_flash.LongcatFlashConfig": "the style 'moe_identity_expert' is not supported",
}
"""Lists the models that 2 ranks cannot share in the size of their default config, and why."""
WITHOUT_DEFAULTS = {
    *("cohere_compass.CohereCompassTextConfig", "dots1.Dots1Config", "hunyuan_v1_moe.HunYuanMoEV1Config"),
    *("lfm2_moe.Lfm2MoeConfig", "llama4.Llama4Config", "ministral.MinistralConfig"),
    *("nemotron.NemotronConfig", "qwen4_exp.Qwen4ExpTextConfig"),
    "voxtral_realtime.VoxtralRealtimeTextConfig",
}
"""Lists configs of which transformers itself makes no model by their defaults."""


@pytest.mark.exhaustive
def test_the_styles_of_all_plans_are_known_or_listed() -> None:
    found = plans()
    assert len(found) > 100
    unknown = {style for plan in found.values() for style in plan.values()} - STYLES - LISTED
    assert not unknown - {"colwise_rep", "rowwise_rep"}


def _model(config: Any) -> nn.Module | None:
    """Make the model of a config class on the meta device; None if it is a part of other models alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if config in mapping:
            kind: Any = mapping[config]
            with torch.device("meta"):
                made: nn.Module = (kind[0] if isinstance(kind, tuple) else kind)(config())
            return made
    return None


@pytest.mark.exhaustive
def test_all_plans_apply_or_are_listed() -> None:
    axis: Any = SimpleNamespace(size=2, rank=0)
    applied, refused, without = set(), {}, set()
    for name in plans():
        module, kind = name.split(".")
        config = getattr(
            importlib.import_module(f"transformers.models.{module}.configuration_{module}"), kind
        )
        try:
            model = _model(config)
        except Exception:  # whatever transformers makes of such a config
            without.add(name)
            continue
        if model is None:
            continue
        try:
            decision = Decision(model, find_plan(model, None), axis)
            decision.decide()
        except zlaunch.ParameterError as error:
            refused[name] = str(error)
            continue
        assert decision.boxes, name
        applied.add(name)
    assert without == WITHOUT_DEFAULTS
    assert refused.keys() == REFUSED.keys()
    for name, why in REFUSED.items():
        assert why in refused[name]
    assert len(applied) > 100


def test_a_plan_of_patterns_names_modules_and_parameters() -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 2)}
    )
    plan: dict[str, Any] = find_plan(model, {"layers.*": "colwise", "head.weight": "rowwise"})
    assert plan == {"layers.0": "colwise", "layers.1": "colwise", "head.weight": "rowwise"}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_families_without_a_plan_are_said_to_have_none(family: str) -> None:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family))
    with pytest.raises(zlaunch.ParameterError, match=rf"{type(model).__name__} has no plan"):
        find_plan(model, None)


def test_a_partition_config_that_splits_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    spec = {"patterns": ["1.weight"]}
    with pytest.raises(zlaunch.ParameterError, match="no spec splits a linear layer of Sequential"):
        find_plan(model, None, {"layer_specs": [spec]})
    with pytest.raises(zlaunch.ParameterError, match=r"no spec matches 0\.weight, which its strict_mode"):
        find_plan(model, None, {"layer_specs": [spec], "strict_mode": True})
    assert find_plan(model, None, {"layer_specs": [{"patterns": ["0"]}]}) == {"0": "colwise"}
